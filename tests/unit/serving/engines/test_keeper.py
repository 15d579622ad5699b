"""When a dead engine is started again, and when not."""

from __future__ import annotations

from typing import Any

import pytest

from components.errors import EngineError, PortInUseError
from components.serving.engines import keeper as keeper_module
from components.serving.engines.keeper import MAX_RESTARTS, EngineKeeper


class FakeEngine:
    def __init__(self, *, ready: bool = True) -> None:
        self.alive = True
        self.ready = ready

    def is_alive(self) -> bool:
        return self.alive

    def is_ready(self) -> bool:
        return self.ready

    def wait_ready(self) -> None:
        raise EngineError("ended before it was ready")


class FakePool:
    def __init__(self, *, num_refusals: int = 0, ready: bool = True) -> None:
        self.engines: list[FakeEngine] = []
        self.num_refusals, self.ready = num_refusals, ready

    def restart(self, key: str, *, number: int) -> FakeEngine:
        if self.num_refusals > 0:
            self.num_refusals -= 1
            raise PortInUseError("port 1 is in use")
        self.engines.append(FakeEngine(ready=self.ready))
        return self.engines[-1]


def keep(pool: Any, engine: Any, told: list[int]) -> EngineKeeper:
    return EngineKeeper(pool, "key", engine, on_restart=told.append)


def test_an_engine_that_was_ready_is_started_again_until_it_dies_too_often() -> None:
    pool = FakePool()
    told = []
    engine = FakeEngine()
    keeper = keep(pool, engine, told)
    for number in range(MAX_RESTARTS):
        keeper.check()
        engine.alive = False
        keeper.check()
        assert keeper.num_restarts == number + 1
        engine = pool.engines[-1]
    keeper.check()
    engine.alive = False
    with pytest.raises(EngineError):
        keeper.check()
    assert told == [1, 2, 3]


def test_an_engine_that_never_came_up_is_not_started_again() -> None:
    engine = FakeEngine(ready=False)
    keeper = keep(FakePool(), engine, [])
    keeper.check()
    engine.alive = False
    with pytest.raises(EngineError, match="before it was ready"):
        keeper.check()


def test_a_restart_that_does_not_come_up_ends_it() -> None:
    pool = FakePool(ready=False)
    engine = FakeEngine()
    keeper = keep(pool, engine, [])
    keeper.check()
    engine.alive = False
    keeper.check()
    pool.engines[-1].alive = False
    with pytest.raises(EngineError):
        keeper.check()


def test_a_port_that_is_not_free_yet_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FakePool(num_refusals=2)
    engine = FakeEngine()
    told = []
    keeper = keep(pool, engine, told)
    keeper.check()
    engine.alive = False
    keeper.check()
    keeper.check()
    assert keeper.num_restarts == 0
    keeper.check()
    assert keeper.num_restarts == 1 and told == [1]
    monkeypatch.setattr(keeper_module, "PORT_GRACE_S", 0.0)
    keeper.check()
    pool.engines[-1].alive, pool.num_refusals = False, 1
    with pytest.raises(PortInUseError):
        keeper.check()
