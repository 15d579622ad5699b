"""Shares of time, on a clock of our own."""

from __future__ import annotations

import pytest

from components.hidden_states import statistics as module
from components.hidden_states.statistics import StreamStatistics


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_the_engine_is_idle_while_no_request_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr(module, "time", clock)
    statistics = StreamStatistics(budget_bytes=1)
    assert statistics.engine_idle_share == 0.0  # nothing has begun
    statistics.start()
    clock.now += 2.0  # idle
    statistics.request_started()
    clock.now += 1.0
    statistics.request_started()  # two at once count once
    clock.now += 1.0
    statistics.request_ended()
    clock.now += 4.0
    assert statistics.engine_idle_share == pytest.approx(2 / 8)  # one is still there
    statistics.request_ended()
    clock.now += 2.0
    statistics.pause()
    clock.now += 100.0
    assert statistics.engine_idle_share == pytest.approx(4 / 10)
    assert statistics.report(keys_left=0).engine_idle_share == pytest.approx(4 / 10)
    assert statistics.live()["stream_engine_idle_share"] == pytest.approx(4 / 10)
