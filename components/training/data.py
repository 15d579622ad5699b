"""Reads a curated dataset's Arrow shards and lays out the order in which its samples are
streamed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from components.contracts import DatasetRef
from components.errors import TrainingError
from components.hidden_states.sample import SampleRequest

Rows: TypeAlias = Any
"""A pyarrow table with the columns of the dataset's layout."""


def load_split(dataset: DatasetRef, split: str) -> Rows:
    """All rows of a split, memory-mapped.

    Raises:
        TrainingError: the folder does not hold the dataset referred to, or the split has no rows.
    """
    folder = Path(dataset.path)
    try:
        digest = json.loads((folder / "manifest.json").read_text())["digest"]
    except (OSError, ValueError, KeyError) as error:
        raise TrainingError(
            "the dataset's manifest cannot be read", got=f"{folder}: {error}"
        ) from None

    if digest != dataset.digest:
        raise TrainingError("the folder holds another dataset", got=digest, expected=dataset.digest)
    files = sorted(folder.glob(f"{split}-*.arrow"))
    tables = [pa.ipc.open_file(pa.memory_map(str(file))).read_all() for file in files]
    if not tables or sum(table.num_rows for table in tables) == 0:
        raise TrainingError(f"the dataset has no {split} rows", got=folder)

    return pa.concat_tables(tables)


def count_tokens(rows: Rows, *, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each token is supervised, and how often it stands in the context; int64 [V] each.

    Raises:
        TrainingError: a token id outside the vocabulary.
    """
    supervised_V, context_V = (
        np.zeros(vocab_size, dtype=np.int64),
        np.zeros(vocab_size, dtype=np.int64),
    )

    for position in range(rows.num_rows):
        token_ids, loss_mask = _row(rows, position)
        if token_ids.size and (token_ids.min() < 0 or token_ids.max() >= vocab_size):
            raise TrainingError(
                "the dataset holds a token the target does not have", got=int(token_ids.max())
            )
        supervised_V += np.bincount(token_ids[loss_mask], minlength=vocab_size)
        context_V += np.bincount(token_ids[~loss_mask], minlength=vocab_size)

    return supervised_V, context_V


def training_order(num_rows: int, *, num_epochs: int, seed: int) -> np.ndarray:
    """Row of every sample of the run, int64 [epochs * rows]: a fresh seeded permutation per
    epoch.
    """
    return np.concatenate(
        [np.random.default_rng((seed, epoch)).permutation(num_rows) for epoch in range(num_epochs)]
    )


def requests(rows: Rows, order: np.ndarray, *, indices: range) -> Iterator[SampleRequest]:
    """Requests for the samples at `indices` of `order`; the index is the place in the run."""
    names = rows.column("conversation_id")
    for index in indices:
        position = int(order[index])
        token_ids, loss_mask = _row(rows, position)
        yield SampleRequest(
            index=index, sample_id=names[position].as_py(), token_ids=token_ids, loss_mask=loss_mask
        )


def _row(rows: Rows, position: int) -> tuple[np.ndarray, np.ndarray]:
    token_ids = rows.column("token_ids")[position].values.to_numpy().astype(np.int32)
    loss_mask = (
        rows.column("loss_mask")[position].values.to_numpy(zero_copy_only=False).astype(np.bool_)
    )
    return token_ids, loss_mask
