"""Answers on disk while they come in: append-only JSON-lines shards, looked up by key.

Every run opens a shard of its own, so a line torn by a kill is the last of its file and nothing is ever rewritten.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from components.curation.conversation import Answer

SYNC_INTERVAL_S = 1.0
"""Lines reach the kernel at once, which a killed process needs; the disk within this time, which a power cut needs."""


class AnswerShards:
    """Shards of one folder. Use as a context manager: entering reads what is there and opens a new shard."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)
        self._known: dict[str, Answer] = {}
        self._file: IO[str] | None = None
        self._synced_at = 0.0
        self.num_torn = 0

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._folder.glob("answers-*.jsonl")):
            self._read(path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def get(self, key: str) -> Answer | None:
        """The answer under `key`, if any run gave it."""
        return self._known.get(key)

    def append(self, key: str, answer: Answer) -> None:
        """Keep an answer: in the kernel's hands when this returns."""
        if self._file is None:
            self._file = self._open_shard()
        self._file.write(json.dumps({"key": key, **asdict(answer)}, separators=(",", ":")) + "\n")
        self._file.flush()
        now = time.monotonic()
        if now - self._synced_at >= SYNC_INTERVAL_S:
            os.fsync(self._file.fileno())
            self._synced_at = now
        self._known[key] = answer

    def _open_shard(self) -> IO[str]:
        number = len(list(self._folder.glob("answers-*.jsonl")))
        while True:  # another run may take the same number: exclusive creation decides
            try:
                return (self._folder / f"answers-{number:05d}.jsonl").open("x")
            except FileExistsError:
                number += 1

    def _read(self, path: Path) -> None:
        with path.open() as file:
            for line in file:
                try:
                    record = json.loads(line)
                    key = record.pop("key")
                    for name in ("token_ids", "prompt_token_ids"):
                        record[name] = tuple(record[name])
                    self._known[key] = Answer(**record)
                except (ValueError, KeyError, TypeError):
                    self.num_torn += 1
