"""Samples on disk, by content: for datasets that are streamed more than once. Bounded,
checksummed, never stale.

    <folder>/<first 16 of the identity's digest>/
        identity.json            fingerprint of the target, layer ids, dtype, hidden size
        states-00000.bin         objects of `wire`, one after the other
        states-00000.jsonl       a line for each: key, offset, num_bytes; written when the object is

Another target, layer list or dtype is another folder, so its states are never read for ours. The
key is a hash of the token ids. Every process writes files of its own, so a line torn by a kill is
the last of its file.

A full cache takes nothing more and evicts nothing: passes over a dataset read everything once,
each in an order of its own, and then the sample that was used longest ago is as likely to be the
next as any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from components.contracts import digest_json, write_atomic
from components.errors import FingerprintMismatchError, StreamError
from components.hidden_states.sample import Entry, Identity
from components.hidden_states.wire import VERSION

IDENTITY_FILE = "identity.json"


class StateCache:
    """The samples of one target, layer list and dtype in a folder. Use `open`.

    One thread reads and adds; another one may `find`.
    """

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._entries: dict[bytes, Entry] = {}
        self._readers: dict[Path, IO[bytes]] = {}
        self._data: IO[bytes] | None = None
        self._index: IO[str] | None = None
        self._is_full = False

    @classmethod
    def open(
        cls, root: Path, identity: Identity, *, limit_bytes: int, is_complete: bool = False
    ) -> StateCache:
        """Open the samples of `identity` under `root`, made where there are none yet.

        Args:
            root: parent folder of all caches.
            identity: run id and consumer do not matter.
            limit_bytes: nothing is added past it.
            is_complete: the cache is all there is to read from, so it must be there.

        Raises:
            FingerprintMismatchError: it must be there, and only other identities' states are.
            StreamError: it must be there and nothing is, or its identity file was altered.
        """
        content = _content(identity)
        folder = Path(root) / digest_json(content)[:16]
        path = folder / IDENTITY_FILE
        if not path.is_file():
            if is_complete:
                _refuse_others(Path(root), content)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(content, indent=2) + "\n")
        elif json.loads(path.read_text()) != content:
            raise StreamError(
                "the identity file of a state cache was altered", got=path, fix="Remove its folder."
            )

        cache = cls(folder, limit_bytes=limit_bytes)
        for index in sorted(folder.glob("states-*.jsonl")):
            cache._read_index(index)
        return cache

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of samples in the folder, other processes' included."""
        return sum(path.stat().st_size for path in self._folder.glob("states-*.bin"))

    def find(self, token_ids: np.ndarray) -> Entry | None:
        """Where the sample of these tokens lies, if it is here."""
        return self._entries.get(_key(token_ids))

    def read_into(self, entry: Entry, view: memoryview) -> None:
        """Copy a sample into a buffer of its size.

        Raises:
            StreamError: the file is shorter than its index says, or gone.
        """
        try:
            reader = self._readers.get(entry.path) or self._readers.setdefault(
                entry.path, entry.path.open("rb")
            )
            reader.seek(entry.offset)
            num_read = reader.readinto(view[: entry.num_bytes])  # type: ignore[attr-defined]
        except OSError as error:
            raise StreamError("a cached sample cannot be read", got=error) from None
        if num_read != entry.num_bytes:
            raise StreamError(
                "a cached sample is cut short", got=f"{num_read} bytes", expected=entry.num_bytes
            )

    def add(self, token_ids: np.ndarray, view: memoryview) -> bool:
        """Keep a sample; False where it is here already, or would pass the limit."""
        key = _key(token_ids)
        if key in self._entries or self._is_full:
            return False
        if self.num_bytes + len(view) > self._limit_bytes:
            self._is_full = True
            return False

        data, index = self._files()
        entry = Entry(Path(data.name), data.tell(), len(view))
        data.write(view)
        data.flush()
        line = {"key": key.hex(), "offset": entry.offset, "num_bytes": entry.num_bytes}
        index.write(json.dumps(line) + "\n")
        index.flush()

        self._entries[key] = entry
        return True

    def forget(self, token_ids: np.ndarray) -> None:
        """Do not find this sample again in this process: it turned out damaged."""
        self._entries.pop(_key(token_ids), None)

    def close(self) -> None:
        """Close the files; what was written reaches the disk."""
        for file in (self._data, self._index):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
                file.close()
        for reader in self._readers.values():
            reader.close()
        self._data = self._index = None
        self._readers.clear()

    def _files(self) -> tuple[IO[bytes], IO[str]]:
        if self._data is None or self._index is None:
            number = len(list(self._folder.glob("states-*.bin")))
            # Another process may take the same number: exclusive creation decides.
            while self._data is None:
                try:
                    self._data = (self._folder / f"states-{number:05d}.bin").open("xb")
                except FileExistsError:
                    number += 1
            self._index = (self._folder / f"states-{number:05d}.jsonl").open("x")
        return self._data, self._index

    def _read_index(self, path: Path) -> None:
        data = path.with_suffix(".bin")
        size = data.stat().st_size if data.is_file() else 0
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
                entry = Entry(data, int(record["offset"]), int(record["num_bytes"]))
                key = bytes.fromhex(record["key"])
            except (ValueError, KeyError, TypeError):
                continue  # torn by a kill
            if entry.offset + entry.num_bytes <= size:
                self._entries[key] = entry


def _key(token_ids: np.ndarray) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(token_ids, dtype="<i4").tobytes())


def _content(identity: Identity) -> dict[str, Any]:
    return {
        "version": VERSION,
        "fingerprint": identity.fingerprint.model_dump(mode="json"),
        "layer_ids": list(identity.layer_ids),
        "hidden_size": identity.hidden_size,
        "dtype": identity.dtype,
    }


def _refuse_others(root: Path, wanted: Mapping[str, Any]) -> None:
    """Say what is there instead of what is wanted."""
    others = [json.loads(path.read_text()) for path in sorted(root.glob(f"*/{IDENTITY_FILE}"))]
    if not others:
        raise StreamError(
            "there are no cached states to read",
            got=root,
            fix="Fill the cache with mode: hybrid first.",
        )

    differing = sorted(
        {name for other in others for name in wanted if other.get(name) != wanted[name]}
    )
    raise FingerprintMismatchError(
        f"the cached states are of another {' and '.join(differing)}",
        got="; ".join(str({name: other.get(name) for name in differing}) for other in others[:3]),
        expected={name: wanted[name] for name in differing},
        fix="Fill the cache for this target and these layers with mode: hybrid.",
    )
