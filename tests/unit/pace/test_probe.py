"""Rates from an engine's counter: the right slope, whatever the prefill and the polling do to
it.
"""

from __future__ import annotations

import json
import time

import httpx
import pytest

from components.errors import EngineError
from components.pace import probe
from components.pace.probe import Counted, EngineProbe, slope


def test_slope_is_from_the_first_growth_to_the_last() -> None:
    # Nothing for 5 s (prompts are read), then 64 tokens every 0.5 s; the last poll sees nothing
    # new.
    samples = [Counted(0, 100), Counted(5, 100)]
    samples += [Counted(5.5 + 0.5 * step, 164 + 64 * step) for step in range(9)]
    samples += [Counted(9.6, 164 + 64 * 8)]
    assert slope(samples) == pytest.approx(128)


def test_one_growth_is_no_slope() -> None:
    assert slope([Counted(0, 0), Counted(1, 0), Counted(2, 64), Counted(3, 64)]) is None
    assert slope([Counted(0, 0), Counted(1, 0)]) is None


class Engine:
    """Counts `rate` tokens per second from when the first request is there, and answers each
    request after a while.
    """

    def __init__(self, rate: float = 100.0, *, counts: bool = True, status: int = 200) -> None:
        self.rate, self.counts, self.status = rate, counts, status
        self.started_s: float | None = None
        self.bodies: list[dict[str, object]] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            taken_s = 0.0 if self.started_s is None else time.monotonic() - self.started_s
            line = f'vllm:generation_tokens_total{{engine="0"}} {self.rate * taken_s}\n'
            return httpx.Response(200, text=line if self.counts else "other 1\n")
        self.started_s = self.started_s or time.monotonic()
        self.bodies.append(json.loads(request.content))
        import asyncio

        await asyncio.sleep(0.05)
        return httpx.Response(self.status, json={"choices": []})


def probed(engine: Engine) -> EngineProbe:
    return EngineProbe(
        "http://engine", "tiny", vocab_size=512, timeout_s=5, transport=httpx.MockTransport(engine)
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "POLL_S", 0.02)


def test_the_answer_rate_is_the_counters() -> None:
    engine = Engine(rate=1000.0)
    assert probed(engine).answer_rate(4, seconds=0.4) == pytest.approx(1000, rel=0.2)
    assert all(body["ignore_eos"] is True for body in engine.bodies)
    prompts = [tuple(body["prompt"]) for body in engine.bodies]  # type: ignore[arg-type]
    assert len(set(prompts)) == len(prompts)  # nothing is found in a prefix cache
    assert all(0 <= token < 512 for prompt in prompts for token in prompt)


def test_watching_an_idle_engine_gives_no_rate_and_ends() -> None:
    started_s = time.monotonic()
    assert probed(Engine()).watch(seconds=0.1) is None
    assert time.monotonic() - started_s < 2


def test_prompts_read_are_counted_by_their_tokens() -> None:
    engine = Engine()
    rate = probed(engine).reading_rate()
    assert sum(len(body["prompt"]) for body in engine.bodies) == 8 * 192  # type: ignore[arg-type,misc]
    assert 0 < rate <= 8 * 192 / 0.05


def test_an_engine_without_the_counter_or_with_errors_is_refused() -> None:
    with pytest.raises(EngineError, match="does not count generated tokens"):
        probed(Engine(counts=False)).answer_rate(2, seconds=0.1)
    with pytest.raises(EngineError, match="could not be probed"):
        probed(Engine(status=500)).answer_rate(2, seconds=0.1)
