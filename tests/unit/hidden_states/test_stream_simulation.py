"""1,000 random schedules of faults against the reading side and the writers' budget, in virtual
time.

Whatever happens in whatever order: never over the budget, never a sample twice or out of order or
altered, every call ends, and after the last sweep the store holds nothing of the run.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from components.errors import EngineError, StoreError, StreamError
from components.hidden_states.checks import LayerVariance
from components.hidden_states.receiver import Receiver
from components.hidden_states.sample import Arrival, Sample, SampleRequest
from components.hidden_states.statistics import StreamStatistics
from components.hidden_states.wire import FLOAT8, layout, run_prefix, store_key
from components.settings import StreamSettings
from tests.support.simulated_world import (
    IDENTITY,
    SimulatedEngine,
    SimulatedStore,
    VirtualClock,
    delivered_states,
)

STORE_BYTES, RING_BYTES = 8 * 1024, 10 * 1024
SETTINGS = StreamSettings(
    aux_layer_ids=(1,),
    requests_in_flight=6,
    request_timeout_s=60,
    max_retries=2,
    max_quarantine_share=0.5,
    orphan_ttl_s=90,
    engine_outage_s=20,
)
LONGEST_RECEIVE_S = (SETTINGS.max_retries + 1) * (60 + 30 + 5 + 20 + 5) + 1
FAULTS = (
    "flip",
    "nan",
    "tokens",
    "zero",
    "late",
    "silent",
    "error",
    "timeout",
    "timeout-late",
    "failed",
    "down",
)


class StreamUnderFaults(RuleBasedStateMachine):
    @initialize(dtype=st.sampled_from(["bfloat16", FLOAT8]))
    def begin(self, dtype: str) -> None:
        self.dtype = dtype
        self.clock = VirtualClock()
        self.store = SimulatedStore(capacity_bytes=24 * 1024)
        self.engine = SimulatedEngine(
            self.clock, self.store, dtype=dtype, budget_bytes=STORE_BYTES, timeout_s=60,
            orphan_ttl_s=SETTINGS.orphan_ttl_s,
        )  # fmt: skip
        self.statistics = StreamStatistics(budget_bytes=STORE_BYTES + RING_BYTES)
        self.receiver = Receiver(
            SETTINGS,
            identity=replace(IDENTITY, dtype=dtype),
            client=self.store,
            engines=self.engine,
            cache=None,
            variance=LayerVariance(IDENTITY.layer_ids),
            lm_head=None,
            statistics=self.statistics,
            stop=threading.Event(),
            store_bytes=STORE_BYTES,
            ring_bytes=RING_BYTES,
            clock=self.clock,
        )  # type: ignore[arg-type]
        self.arrivals: deque[Arrival] = deque()
        self.held: deque[Sample] = deque()
        self.delivered: list[int] = []
        self.num_sent = 0
        self.has_failed = False

    @precondition(lambda self: not self.has_failed)
    @rule(
        num_tokens=st.integers(1, 30),
        faults=st.lists(st.sampled_from((None, None, None, *FAULTS)), max_size=3),
    )
    def send(self, num_tokens: int, faults: list[str | None]) -> None:
        """As the feeder, which would wait for credits and a slot; `faults` meet the sample's
        attempts one by one.
        """
        if len(self.arrivals) == SETTINGS.requests_in_flight:
            self.receive()
        index = self.num_sent
        ids = np.random.default_rng(index).integers(3, 500, num_tokens).astype(np.int32)
        request = SampleRequest(index, f"s{index}", ids, np.ones(num_tokens, dtype=np.bool_))
        remaining = iter(faults)
        planned = self.engine.fault

        def fault(name: str) -> str | None:
            mine = name.rsplit("-", 2)[-2] == str(index)
            return next(remaining, None) if mine else planned(name)

        self.engine.fault = fault
        size = layout(
            num_tokens=num_tokens, num_layers=2, hidden_size=IDENTITY.hidden_size, dtype=self.dtype
        ).num_bytes
        while not self.has_failed and self.receiver.credits.used_bytes + size > STORE_BYTES:
            self.receive()
        if self.has_failed:
            return
        arrival = self.receiver.send(request, serial=index)
        assert arrival is not None
        self.num_sent += 1
        self.arrivals.append(arrival)

    @precondition(lambda self: self.arrivals and not self.has_failed)
    @rule()
    def receive(self) -> None:
        """As the receiver's thread, while the consumer leaves room in the ring. Slots come back
        with the answers.
        """
        while self.held and self.receiver.ring.used_bytes + 2 * 4096 > RING_BYTES:
            self.release()
        arrival = self.arrivals.popleft()
        started = self.clock.now()
        try:
            sample = self.receiver.receive(arrival)
        except (StreamError, EngineError, StoreError):
            self.has_failed = True  # an end like any other: what must hold holds after it too
            return
        finally:
            assert self.clock.now() - started <= LONGEST_RECEIVE_S
        if sample is not None:
            newest = [
                name
                for name in self.engine.names
                if name.rsplit("-", 2)[-2] == str(arrival.request.index)
            ][-1]
            assert store_key(IDENTITY.run_id, newest) not in self.store.objects  # used once
            assert torch.equal(
                sample.states_TLH, delivered_states(arrival.request.token_ids, self.dtype)
            )
            self.delivered.append(arrival.request.index)
            self.held.append(sample)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        """As a consumer that is done with its oldest sample."""
        self.held.popleft().release()

    @rule(duration_s=st.floats(0, 100))
    def wait(self, duration_s: float) -> None:
        self.clock.sleep(duration_s)

    @rule(away_s=st.floats(0, 40))
    def crash_engine(self, away_s: float) -> None:
        self.engine.crash(away_s)

    @rule(num_bytes=st.integers(0, 24 * 1024))
    def fill_with_another_run(self, num_bytes: int) -> None:
        self.store.other_bytes = min(num_bytes, self.store.capacity_bytes - self.store.used_bytes)

    @rule(data=st.data())
    def evict_unread(self, data: st.DataObject) -> None:
        if self.store.objects:
            del self.store.objects[data.draw(st.sampled_from(sorted(self.store.objects)))]
            self.store.num_evicted += 1

    @rule(duration_s=st.floats(0.1, 20))
    def lose_the_master(self, duration_s: float) -> None:
        self.store.is_down = True
        self.clock.after(duration_s, self._master_returns)

    def _master_returns(self) -> None:
        self.store.is_down = False

    @invariant()
    def never_over_the_budget(self) -> None:
        if not hasattr(self, "store"):
            return
        samples = sum(
            len(data) for key, data in self.store.objects.items() if not key.endswith(":error")
        )
        assert samples <= STORE_BYTES
        assert self.receiver.ring.used_bytes <= RING_BYTES
        assert self.receiver.credits.used_bytes <= STORE_BYTES

    @invariant()
    def never_twice_or_out_of_order(self) -> None:
        if hasattr(self, "store"):
            assert all(
                before < after
                for before, after in zip(self.delivered, self.delivered[1:], strict=False)
            )
            assert len(self.engine.names) == len(set(self.engine.names))

    def teardown(self) -> None:
        """The rest is read, then the stream closes as `HiddenStateStream.close` does; later the
        orphans' time is up.
        """
        if not hasattr(self, "store"):
            return
        while self.arrivals and not self.has_failed:
            self.receive()
        if not self.has_failed:
            assert len(self.delivered) + self.statistics.num_quarantined == self.num_sent
            assert self.receiver.credits.used_bytes == 0
        while self.held:
            self.release()
        assert self.receiver.ring.used_bytes == 0 or self.has_failed
        self.engine.cancel_all()
        self.clock.sleep(2.0)
        if not self.store.is_down:
            self.store.remove_prefix(run_prefix(IDENTITY.run_id))
        # The latest write, its time to live, two sweeps.
        self.clock.sleep(60 + SETTINGS.orphan_ttl_s + 20)
        assert self.store.objects == {}


TestStreamUnderFaults: Any = StreamUnderFaults.TestCase
TestStreamUnderFaults.settings = settings(
    max_examples=1000,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
