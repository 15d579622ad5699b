"""The reading side's Mooncake client: one per process, contributing no memory, reading into
registered buffers.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import httpx

from components.contracts import StoreEndpoint
from components.errors import StoreError
from components.hidden_states.wire import run_prefix

if TYPE_CHECKING:
    import torch  # two seconds of every flow's start, for the sake of a name

NOT_FOUND = -704
_NOT_READY = -703
_BUFFER_TOO_SMALL = -600
_WORDS = {
    -200: "the store is full (no segment has room)",
    -600: "the reader's buffer is smaller than the object",
    -703: "the writer has not finished",
    -704: "the key does not exist: not written yet, removed, or evicted",
    -706: "the key is under a reader's lease",
    -707: "the key's lease expired while it was read",
    -800: "the transfer from the engine's memory failed",
    -900: "the master does not answer",
}
_LOCAL_BUFFER_BYTES = 16 << 20  # for markers; samples go straight into registered buffers
_CONNECT_TIMEOUT_S = 3.0
_CLOSE_TIMEOUT_S = 5.0
_ResultT = TypeVar("_ResultT")
ReadOutcome = Literal["read", "absent", "other size", "broken"]


@dataclass(frozen=True)
class StoreMetrics:
    """The master's own counters, over all runs."""

    num_keys: int
    allocated_bytes: int
    capacity_bytes: int
    num_evicted: int
    file_bytes: int


class StoreClient:
    """A connection to the store. Use `connect`; every process has one client per endpoint, shared
    by its users.

    All methods raise `StoreError` when the master is down or the store answers with an error.
    """

    _shared: ClassVar[dict[str, StoreClient]] = {}
    _shared_lock = threading.Lock()

    def __init__(self, endpoint: StoreEndpoint) -> None:
        self.endpoint = endpoint
        self._num_users = 0
        self._store = _setup(endpoint)
        self._http = httpx.Client(timeout=_CONNECT_TIMEOUT_S, trust_env=False)

    @classmethod
    def connect(cls, endpoint: StoreEndpoint) -> StoreClient:
        """The process's client of that store, connected; pair it with `close`.

        Raises:
            StoreError: the master is not reachable, or refuses.
        """
        with cls._shared_lock:
            client = cls._shared.get(endpoint.digest)
            if client is None:
                client = cls._shared[endpoint.digest] = cls(endpoint)
            client._num_users += 1
            return client

    def close(self) -> None:
        """Give the client up; the last user disconnects. Never hangs, even with the master gone."""
        with self._shared_lock:
            self._num_users -= 1
            if self._num_users > 0:
                return
            self._shared.pop(self.endpoint.digest, None)
        self._http.close()
        # Mooncake's close retries the master without end; a thread that is left behind costs
        # nothing.
        closing = threading.Thread(target=self._store.close, name="store-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)

    def ping(self) -> None:
        """Raise `StoreError` at once if nothing listens at the master; other calls take four
        seconds to say so.
        """
        _require_listening(self.endpoint)

    def register(self, buffer: torch.Tensor) -> None:
        """Register a contiguous CPU buffer for `read_into`."""
        _check(
            "register_buffer",
            "the reader's buffer",
            self._store.register_buffer(buffer.data_ptr(), buffer.nbytes),
        )

    def unregister(self, buffer: torch.Tensor) -> None:
        """Undo `register`; the buffer may be freed afterwards."""
        self._store.unregister_buffer(buffer.data_ptr())

    def read_into(self, key: str, pointer: int, num_bytes: int) -> ReadOutcome:
        """Copy an object of `num_bytes` to an address inside a registered buffer.

        'absent': not there, or still being written. 'other size': there, and larger or smaller.
        'broken': there, but the transfer failed; the memory it lies in belongs to an engine that
        may just have died.
        """
        status = self._call(self._store.get_into, key, pointer, num_bytes)
        if status == num_bytes:
            return "read"
        if status in (NOT_FOUND, _NOT_READY):
            return "absent"
        return "other size" if status >= 0 or status == _BUFFER_TOO_SMALL else "broken"

    def read_small(self, key: str) -> bytes | None:
        """Bytes of a small object, such as an error marker; None if there is none."""
        if _check("is_exist", key, self._call(self._store.is_exist, key)) == 0:
            return None
        data: bytes = self._call(self._store.get, key)
        return data or None

    def remove(self, key: str) -> bool:
        """Remove a key, its lease notwithstanding; False if it did not exist."""
        status = self._call(self._store.remove, key, force=True)
        return status != NOT_FOUND and _check("remove", key, status) == 0

    def remove_prefix(self, prefix: str) -> int:
        """Remove all keys that start with `prefix`; return how many."""
        status: int = self._call(self._store.remove_by_regex, "^" + re.escape(prefix), force=True)
        return _check("remove_by_regex", prefix, status)

    def keys(self, prefix: str) -> list[str]:
        """Keys that start with `prefix`, as the master lists them."""
        text = self._get(self.endpoint.metrics_url.removesuffix("/metrics") + "/get_all_keys")
        return [key for key in text.splitlines() if key.startswith(prefix)]

    def num_bytes_on_disk(self, key: str, *, num_bytes: int) -> int:
        """Bytes of an object's replicas that the store keeps on a disk (SSD or file offload), not
        in memory.
        """
        replicas = self._call(self._store.get_replica_desc, key)
        return sum(num_bytes for replica in replicas if not replica.is_memory_replica())

    def metrics(self) -> StoreMetrics:
        """The master's counters."""
        return parse_metrics(self._get(self.endpoint.metrics_url))

    def _get(self, url: str) -> str:
        try:
            return self._http.get(url).raise_for_status().text
        except httpx.HTTPError as error:
            raise StoreError(
                "the Mooncake master's metrics port does not answer", got=f"{url}: {error}"
            ) from None

    def _call(self, function: Callable[..., _ResultT], *args: object, **kwargs: object) -> _ResultT:
        """Call into Mooncake and turn 'master gone' into an error; each such call costs it about
        four seconds.
        """
        result = function(*args, **kwargs)
        if result == -900:
            raise _master_down(self.endpoint)
        return result


def sweep_run(store: StoreEndpoint, run_id: str) -> int:
    """Remove every key of a run, from any process, also after the run was killed; return how many
    there were.

    Raises:
        StoreError: the master is not reachable.
    """
    client = StoreClient.connect(store)
    try:
        return client.remove_prefix(run_prefix(run_id))
    finally:
        client.close()


def count_run_keys(store: StoreEndpoint, run_id: str) -> int:
    """Keys of a run that are in the store now."""
    client = StoreClient.connect(store)
    try:
        return len(client.keys(run_prefix(run_id)))
    finally:
        client.close()


def parse_metrics(text: str) -> StoreMetrics:
    """Read the master's Prometheus page.

    Raises:
        StoreError: a counter is missing.
    """
    values: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name.startswith("master_"):
            # Lines with labels or histograms hold nothing we read.
            with contextlib.suppress(ValueError):
                values[name] = float(value)

    try:
        return StoreMetrics(
            num_keys=int(values["master_key_count"]),
            allocated_bytes=int(values["master_allocated_bytes"]),
            capacity_bytes=int(values["master_total_capacity_bytes"]),
            num_evicted=int(values["master_evicted_key_count"]),
            file_bytes=int(values["master_allocated_file_size_bytes"]),
        )
    except KeyError as error:
        raise StoreError(
            "the metrics page is not a Mooncake master's", got=f"no {error.args[0]}"
        ) from None


def _setup(endpoint: StoreEndpoint) -> Any:
    _require_listening(endpoint)
    # The client logs each transfer session otherwise.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    # Loads 60 MB of libraries; only readers need them.
    from mooncake.store import (
        MooncakeDistributedStore,
    )

    store = MooncakeDistributedStore()
    status = store.setup(
        endpoint.local_hostname, "P2PHANDSHAKE", 0, _LOCAL_BUFFER_BYTES,
        endpoint.protocol, endpoint.rdma_devices, endpoint.master_address,
    )  # fmt: skip
    _check("setup", endpoint.master_address, status)
    return store


def _require_listening(endpoint: StoreEndpoint) -> None:
    """Ask the port first: Mooncake's own setup retries for a long time before it gives up."""
    host, _, port = endpoint.master_address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S):
            return
    except (OSError, ValueError):
        raise _master_down(endpoint) from None


def _master_down(endpoint: StoreEndpoint) -> StoreError:
    return StoreError(
        "the Mooncake master does not answer",
        got=endpoint.master_address,
        fix="Start it with `make up`, then rerun.",
    )


def _check(operation: str, key: str, status: int, *, expected: object = "0 or more") -> int:
    if status < 0 or (isinstance(expected, int) and status != expected):
        words = _WORDS.get(
            status, "an object of another size" if status >= 0 else "see Mooncake's error codes"
        )
        raise StoreError(
            f"Mooncake {operation} failed for {key}: {words}",
            got=f"status {status}",
            expected=expected,
        )
    return status
