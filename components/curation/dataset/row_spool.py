"""Rendered rows on their way into the dataset: on disk as they come, read back in the order of
their ids.

Memory holds about 50 bytes a row (id, source, place), whatever its length.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from components.curation.conversation import Origin, Row
from components.curation.dataset.split import TRAIN, VALIDATION
from components.errors import CurationError

SPLITS = (TRAIN, VALIDATION)
_ID_BYTES = 32


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One row as the dataset holds it: `token_ids` int32 [T], `loss_mask` bool [T]."""

    conversation_id: str
    source: str
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    origin: Origin


class RowSpool:
    """Rows of both splits. Files `rows.tokens` and `rows.mask` in `folder`, gone after
    `remove`.
    """

    def __init__(self, folder: Path) -> None:
        self._tokens_path, self._mask_path = (
            Path(folder) / "rows.tokens",
            Path(folder) / "rows.mask",
        )
        self._tokens: IO[bytes] = self._tokens_path.open("wb")
        self._masks: IO[bytes] = self._mask_path.open("wb")
        self._splits = {split: _Index() for split in SPLITS}
        self._num_stored = 0

    def add(self, row: Row, split: str) -> None:
        """Keep a row.

        Raises:
            CurationError: token ids and mask have different lengths.
        """
        if len(row.token_ids) != len(row.loss_mask):
            raise CurationError(
                f"row {row.conversation_id[:16]} has a mask of another length than its tokens",
                got=f"{len(row.token_ids)} tokens, {len(row.loss_mask)} mask entries",
            )
        self._tokens.write(np.asarray(row.token_ids, dtype="<i4").tobytes())
        self._masks.write(np.asarray(row.loss_mask, dtype=np.bool_).tobytes())
        self._splits[split].add(row, self._num_stored)
        self._num_stored += len(row.token_ids)

    def counts(self) -> dict[str, int]:
        """Rows by split."""
        return {split: len(index.starts) for split, index in self._splits.items()}

    def num_tokens(self) -> dict[str, int]:
        """Tokens by split."""
        return {split: sum(index.lengths) for split, index in self._splits.items()}

    def num_loss_tokens(self) -> dict[str, int]:
        """Supervised tokens by split."""
        return {split: index.num_loss_tokens for split, index in self._splits.items()}

    def ordered(self, split: str) -> Iterator[StoredRow]:
        """Rows of one split, in the order of their ids. All rows must have been added."""
        self._tokens.flush()
        self._masks.flush()
        if self._num_stored == 0:
            return

        index = self._splits[split]
        # Read, not mapped: mapped pages would count as memory of this process, one row after
        # another.
        with (
            self._tokens_path.open("rb", buffering=0) as tokens,
            self._mask_path.open("rb", buffering=0) as masks,
        ):
            for position in index.order():
                start, length = index.starts[position], index.lengths[position]
                yield StoredRow(
                    conversation_id=index.id_of(position),
                    source=index.places[index.numbers[position]][0],
                    origin=index.places[index.numbers[position]][1],
                    token_ids=np.frombuffer(
                        os.pread(tokens.fileno(), 4 * length, 4 * start), dtype="<i4"
                    ),
                    loss_mask=np.frombuffer(
                        os.pread(masks.fileno(), length, start), dtype=np.bool_
                    ),
                )

    def remove(self) -> None:
        """Delete the files."""
        for file, path in ((self._tokens, self._tokens_path), (self._masks, self._mask_path)):
            file.close()
            path.unlink(missing_ok=True)


class _Index:
    """Where the rows of one split lie."""

    def __init__(self) -> None:
        self.ids = bytearray()
        self.numbers = array("i")
        self.places: list[tuple[str, Origin]] = []
        self._known: dict[tuple[str, Origin], int] = {}
        self.starts = array("q")
        self.lengths = array("i")
        self.num_loss_tokens = 0

    def add(self, row: Row, start: int) -> None:
        self.ids += bytes.fromhex(row.conversation_id)
        place = (row.source, row.origin)
        if place not in self._known:
            self._known[place] = len(self.places)
            self.places.append(place)
        self.numbers.append(self._known[place])
        self.starts.append(start)
        self.lengths.append(len(row.token_ids))
        self.num_loss_tokens += row.num_loss_tokens

    def id_of(self, position: int) -> str:
        return self.ids[position * _ID_BYTES : (position + 1) * _ID_BYTES].hex()

    def order(self) -> Iterator[int]:
        # Zero bytes at the end would be cut off by numpy's S type, so the ids are compared as four
        # big-endian words.
        words = np.frombuffer(bytes(self.ids), dtype=">u8").reshape(-1, _ID_BYTES // 8)
        for part in np.array_split(np.lexsort(words.T[::-1]), max(1, len(words) // 4096)):
            yield from part.tolist()


def spool_rows(splits: Mapping[str, list[Row]], folder: Path) -> RowSpool:
    """A spool of rows that are in memory already."""
    spool = RowSpool(folder)
    for split, rows in splits.items():
        for row in rows:
            spool.add(row, split)
    return spool
