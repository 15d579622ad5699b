"""A store, engines and a clock that exist in memory only: what can go wrong between them is decided
by a test.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from components.contracts import TargetFingerprint
from components.errors import EngineError, StoreError
from components.hidden_states import wire
from components.hidden_states.codec import dequantize_into, quantize
from components.hidden_states.extraction_client import EngineAwayError
from components.hidden_states.in_vllm.held_keys import HeldKeys, StoreRefusedError
from components.hidden_states.sample import Identity
from components.hidden_states.store import StoreMetrics
from components.system.clock import Clock

FINGERPRINT = TargetFingerprint(
    weights="a" * 64, quantization="b" * 64, tokenizer="c" * 64, serving="d" * 64
)
IDENTITY = Identity(
    run_id="run", consumer="0-abc", fingerprint=FINGERPRINT, layer_ids=(1, 2), hidden_size=16
)
SWEEP_EVERY_S = 5.0


class VirtualClock(Clock):
    """Time that passes only when somebody waits, and then in no time; events happen in order on the
    way.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self._now

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        """Let something happen `delay_s` from now."""
        heapq.heappush(self._events, (self._now + delay_s, next(self._numbers), event))

    def sleep(self, duration_s: float) -> None:
        self.run_until(self._now + duration_s)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.sleep(timeout_s)
        return event.is_set()

    def run_until(self, time_s: float, *, unless: Callable[[], bool] = lambda: False) -> None:
        """Pass to `time_s`, or to the first event after which `unless` holds."""
        while not unless() and self._events and self._events[0][0] <= time_s:
            self._now, _, event = heapq.heappop(self._events)
            event()
        if not unless():
            self._now = max(self._now, time_s)


@dataclass
class SimulatedStore:
    """The reader's `StoreClient` and the writers' store in one, with a capacity that other runs may
    eat into.
    """

    capacity_bytes: int
    objects: dict[str, bytes] = field(default_factory=dict)
    other_bytes: int = 0
    is_down: bool = False
    num_evicted: int = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of this run's objects."""
        return sum(map(len, self.objects.values()))

    def write(self, key: str, data: bytes) -> bool:
        """Put an object; False if there is no room."""
        if self.is_down or self.used_bytes + self.other_bytes + len(data) > self.capacity_bytes:
            return False
        self.objects.setdefault(key, data)
        return True

    # The writers' view (HeldKeys).

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [-900 if self.is_down else int(key in self.objects) for key in keys]

    # Both views.

    def remove(self, key: str, force: bool = True) -> Any:
        assert force
        if self.is_down:
            raise StoreError("the Mooncake master does not answer")
        return 0 if self.objects.pop(key, None) is not None else -704

    # The reader's view.

    def register(self, buffer: torch.Tensor) -> None:
        """Nothing to do."""

    def unregister(self, buffer: torch.Tensor) -> None:
        """Nothing to do."""

    def metrics(self) -> StoreMetrics:
        self._require_master()
        held = self.used_bytes + self.other_bytes
        return StoreMetrics(len(self.objects), held, self.capacity_bytes, self.num_evicted, 0)

    def read_into(self, key: str, pointer: int, num_bytes: int) -> str:
        self._require_master()
        data = self.objects.get(key)
        if data is None:
            return "absent"
        if len(data) != num_bytes:
            return "other size"
        ctypes.memmove(pointer, data, num_bytes)
        return "read"

    def read_small(self, key: str) -> bytes | None:
        self._require_master()
        return self.objects.get(key)

    def num_bytes_on_disk(self, key: str, *, num_bytes: int) -> int:
        return 0

    def remove_prefix(self, prefix: str) -> None:
        self._require_master()
        for key in [key for key in self.objects if key.startswith(prefix)]:
            del self.objects[key]

    def _require_master(self) -> None:
        if self.is_down:
            raise StoreError("the Mooncake master does not answer")


class SimulatedFuture:
    """A future of virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._callbacks: list[Callable[[Any], None]] = []
        self._outcome: int | BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self._outcome is not None

    def finish(self, outcome: int | BaseException) -> None:
        if self._outcome is not None:
            raise InvalidStateError
        self._outcome = outcome
        for callback in self._callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self.is_done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def result(self, timeout: float) -> int:
        self._clock.run_until(self._clock.now() + timeout, unless=lambda: self.is_done)
        if self._outcome is None:
            raise FutureTimeoutError
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


class SimulatedEngine:
    """The reader's `ExtractionClient` and the engine with its connector behind it.

    `fault(name)` names what goes wrong with a request: None; 'flip', 'nan', 'tokens', 'zero' (a
    damaged sample); 'late' (written long after the answer), 'silent' (never), 'error' (a marker),
    'timeout', 'timeout-late' (the client gives up, the sample appears all the same), 'failed' (an
    answer that is none), 'down' (not reachable).
    """

    def __init__(
        self,
        clock: VirtualClock,
        store: SimulatedStore,
        *,
        dtype: str,
        budget_bytes: int,
        timeout_s: float,
        orphan_ttl_s: float,
    ) -> None:
        self._dtype = dtype
        self.clock, self.store, self._timeout_s = clock, store, timeout_s
        self._budget_bytes, self._orphan_ttl_s = budget_bytes, orphan_ttl_s
        self.fault: Callable[[str], str | None] = lambda name: None
        self.names: list[str] = []
        self._written: set[str] = set()
        self._open: list[tuple[str, SimulatedFuture]] = []
        self._cancelled: set[str] = set()
        self._life = 0
        self._back_at = 0.0
        self._held = self._new_held()
        clock.after(SWEEP_EVERY_S, self._sweep)

    def crash(self, away_s: float) -> None:
        """End without a word: requests break, what the engine's memory held is gone; a new one is
        there later.
        """
        self._life += 1
        self._back_at = self.clock.now() + away_s
        for key in self._written:
            self.store.objects.pop(key, None)
        self._written.clear()
        self._held = self._new_held()
        for _, future in self._take_open():
            future.finish(EngineAwayError("the extraction engine is not reachable"))

    def cancel_all(self) -> None:
        """The client hangs up: open requests are aborted and store nothing."""
        for name, future in self._take_open():
            self._cancelled.add(name)
            future.finish(CancelledError())

    def request(self, *, index: int, name: str, token_ids: np.ndarray) -> SimulatedFuture:
        self.names.append(name)
        fault = self.fault(name)
        life = self._life
        future = SimulatedFuture(self.clock)
        if self.clock.now() < self._back_at:
            future.finish(EngineAwayError("the extraction engine is not reachable"))
            return future
        self._open.append((name, future))

        def answer() -> None:
            if future.is_done:
                return
            if fault == "down":
                future.finish(EngineAwayError("the extraction engine is not reachable"))
            elif fault == "failed":
                future.finish(EngineError("the extraction engine failed"))
            elif fault in ("timeout", "timeout-late"):
                future.finish(EngineError("the extraction engine did not answer in time"))
            else:
                future.finish(7)

        def write() -> None:
            if life == self._life and name not in self._cancelled:
                self._write(name, token_ids, fault)

        answer_s = (
            self._timeout_s
            if fault in ("timeout", "timeout-late")
            else 0.1 + 0.01 * (len(token_ids) % 7)
        )
        self.clock.after(answer_s, answer)
        if fault not in ("silent", "down", "failed", "timeout"):
            self.clock.after(answer_s + (40.0 if fault == "late" else 0.02), write)
        return future

    def _take_open(self) -> list[tuple[str, SimulatedFuture]]:
        taken = [(name, future) for name, future in self._open if not future.is_done]
        self._open = []
        return taken

    def _new_held(self) -> HeldKeys:
        return HeldKeys(
            budget_bytes=self._budget_bytes, orphan_ttl_s=self._orphan_ttl_s, clock=self.clock.now
        )

    def _sweep(self) -> None:
        if not self.store.is_down:
            self._held.sweep(self.store)
        self.clock.after(SWEEP_EVERY_S, self._sweep)

    def _write(self, name: str, token_ids: np.ndarray, fault: str | None) -> None:
        key = wire.store_key(IDENTITY.run_id, name)
        if fault == "error":
            self._mark(key, "injected")
            return
        data = sample_object(name, token_ids, fault, self._dtype)
        try:
            self._held.admit(key, len(data), store=self.store)
        except StoreRefusedError as refused:
            self._mark(key, str(refused))
            return
        if self.store.write(key, data):
            self._held.confirm(key)
            self._written.add(key)
        else:
            self._held.drop(key)
            self._mark(key, "store full")

    def _mark(self, key: str, text: str) -> None:
        marker = wire.error_key(key)
        if self.store.write(marker, json.dumps({"error": text}).encode()):
            self._held.admit(marker, 0, store=self.store)
            self._held.confirm(marker)
            self._written.add(marker)


def delivered_states(token_ids: np.ndarray, dtype: str) -> torch.Tensor:
    """What a reader must get: the states themselves, or what eight bits leave of them."""
    states_TLH = states_of(token_ids)
    if dtype == wire.FLOAT8:
        dequantize_into(states_TLH, *quantize(states_TLH.clone()))
    return states_TLH


def states_of(token_ids: np.ndarray) -> torch.Tensor:
    """States that depend on the tokens, so that a mix-up of samples shows."""
    generator = torch.Generator().manual_seed(
        int(token_ids.astype(np.int64).sum()) * 4093 + len(token_ids)
    )
    shape = (len(token_ids), len(IDENTITY.layer_ids), IDENTITY.hidden_size)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def sample_object(name: str, token_ids: np.ndarray, fault: str | None, dtype: str) -> bytes:
    """The object of one sample, damaged as `fault` says."""
    states_TLH = states_of(token_ids)
    if fault == "nan":
        states_TLH[0, 1, 3] = float("nan")
    if fault == "zero":
        states_TLH[:, 0] = 0
    num_tokens, num_layers, hidden_size = states_TLH.shape
    place = wire.layout(
        num_tokens=num_tokens, num_layers=num_layers, hidden_size=hidden_size, dtype=dtype
    )
    buffer = torch.zeros(place.num_bytes, dtype=torch.uint8)
    values, scales_TL = (
        quantize(states_TLH) if dtype == wire.FLOAT8 else (states_TLH, torch.empty(0))
    )
    for offset, part in ((place.states_offset, values), (place.scales_offset, scales_TL)):
        end = offset + part.numel() * part.element_size()
        buffer[offset:end].view(part.dtype).view(part.shape).copy_(part)
    ids = token_ids + 1 if fault == "tokens" else token_ids
    end = place.tokens_offset + place.tokens_bytes
    buffer[place.tokens_offset : end].view(torch.int32).copy_(torch.from_numpy(ids))
    header = wire.SampleHeader(
        run_id=IDENTITY.run_id,
        sample=name,
        weights=FINGERPRINT.weights,
        fingerprint=FINGERPRINT.digest,
        layer_ids=IDENTITY.layer_ids,
        dtype=dtype,
        shape=(num_tokens, num_layers, hidden_size),
        checksum=wire.payload_checksum(memoryview(buffer.numpy())),
    )
    buffer[: wire.HEADER_BYTES] = torch.frombuffer(
        bytearray(wire.pack_header(header)), dtype=torch.uint8
    )
    if fault == "flip":
        buffer[place.states_offset + 5] ^= 1
    return bytes(buffer.numpy())
