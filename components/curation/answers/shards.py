"""Answers on disk while they come in: append-only JSON-lines shards, looked up by key.

Memory holds the place of each answer, not the answer. Every run opens a shard of its own, so a line
torn by a kill is the last of its file and nothing is ever rewritten.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from components.curation.answers.spool import to_answer
from components.curation.conversation import Answer

SYNC_INTERVAL_S = 1.0
"""Lines reach the kernel at once, which a killed process needs; the disk within this time, which a
power cut needs.
"""


class AnswerShards:
    """Shards of one folder. Use as a context manager: entering reads what is there and opens a new
    shard.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)
        self._places: dict[bytes, tuple[int, int]] = {}
        """Number of the file in `_paths`, and offset of the line, by key."""
        self._paths: list[Path] = []
        self._readers: dict[int, IO[bytes]] = {}
        self._file: IO[bytes] | None = None
        self._synced_at = 0.0
        self.num_torn = 0

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._folder.glob("answers-*.jsonl")):
            self._index(path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    @property
    def num_answers(self) -> int:
        """Answers that can be looked up."""
        return len(self._places)

    def get(self, key: str) -> Answer | None:
        """The answer under `key`, if any run gave it."""
        place = self._places.get(bytes.fromhex(key))
        if place is None:
            return None
        number, offset = place
        if number not in self._readers:
            self._readers[number] = self._paths[number].open("rb")
        reader = self._readers[number]
        reader.seek(offset)
        return _parse(reader.readline())[1]

    def append(self, key: str, answer: Answer) -> None:
        """Keep an answer: in the kernel's hands when this returns."""
        if self._file is None:
            self._file = self._open_shard()
        offset = self._file.tell()
        self._file.write(
            json.dumps({"key": key, **asdict(answer)}, separators=(",", ":")).encode() + b"\n"
        )
        self._file.flush()
        now = time.monotonic()
        if now - self._synced_at >= SYNC_INTERVAL_S:
            os.fsync(self._file.fileno())
            self._synced_at = now
        self._places[bytes.fromhex(key)] = (len(self._paths) - 1, offset)

    def _open_shard(self) -> IO[bytes]:
        number = len(list(self._folder.glob("answers-*.jsonl")))
        while True:  # another run may take the same number: exclusive creation decides
            path = self._folder / f"answers-{number:05d}.jsonl"
            try:
                file = path.open("xb")
            except FileExistsError:
                number += 1
            else:
                self._paths.append(path)
                return file

    def _index(self, path: Path) -> None:
        number = len(self._paths)
        self._paths.append(path)
        offset = 0
        with path.open("rb") as file:
            for line in file:
                try:
                    key, _ = _parse(line)
                    self._places[bytes.fromhex(key)] = (number, offset)
                except (ValueError, KeyError, TypeError):
                    self.num_torn += 1
                offset += len(line)


def _parse(line: bytes) -> tuple[str, Answer]:
    record = json.loads(line)
    key = str(record.pop("key"))
    return key, to_answer(record)
