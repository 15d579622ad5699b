"""Latency definitions, interleaving of arms, and the schedule that follows from the break-even."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from components.contracts import ArmEndpoint
from components.errors import EvaluationError
from components.evaluation.prompts import Prompt
from components.evaluation.speed import (
    Round,
    choose_schedule,
    draft_tokens_at,
    inter_token_latencies_ms,
    load_limit,
    measure_speed,
    speed_point,
    speedups,
)
from components.settings import EvaluationSettings

PROMPTS = tuple(Prompt(f"a/{n}", "a", ({"role": "user", "content": f"prompt {n}"},)) for n in range(2))


def test_chunks_of_several_tokens_count_per_token() -> None:
    assert inter_token_latencies_ms([(0.1, 1), (0.2, 2), (0.5, 5)]) == pytest.approx([100, 100, 100, 100])
    assert inter_token_latencies_ms([(0.1, 3)]) == []


def test_speed_point_takes_medians_over_rounds() -> None:
    rounds = [Round(2, rate, (10.0, ttft), (5.0,)) for rate, ttft in [(100, 10.0), (1, 90.0), (80, 30.0)]]
    point = speed_point(4, rounds)
    assert point.output_tokens_per_s == 80
    assert point.ttft_p50_ms == 20
    assert point.num_requests == 6
    assert point.round_tokens_per_s == (100, 1, 80)


def test_arms_alternate_and_turn_round(engine: Any) -> None:
    order: list[str] = []

    def note(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/chat/completions" and json.loads(request.content).get("stream"):
            order.append(request.url.host)
        return engine.answer(request)

    arms = [ArmEndpoint(arm=name, url=f"http://{name}", model="m", num_draft_tokens=2) for name in ("a", "b")]
    settings = EvaluationSettings(slices={"a": 2}, speed_concurrency=(1, 2), speed_requests=1, speed_repeats=2)
    speed = measure_speed(arms, PROMPTS, settings=settings, transport=httpx.MockTransport(note))
    assert "".join(order) == "abba" + "aabbbbaa"
    assert [point.concurrency for point in speed["b"]] == [1, 2]
    assert [point.num_requests for point in speed["b"]] == [2, 4]
    assert all(point.output_tokens_per_s > 0 for point in speed["a"])


def test_an_engine_that_fails_is_one_clear_error() -> None:
    broken = httpx.MockTransport(lambda request: httpx.Response(500, text="dead"))
    with pytest.raises(EvaluationError, match="HTTP 500: dead"):
        measure_speed(
            [ArmEndpoint(arm="a", url="http://a", model="m")],
            PROMPTS,
            settings=EvaluationSettings(slices={"a": 2}),
            transport=broken,
        )


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        ({1: 60, 4: 140, 8: 165}, ((1, 4, 4), (5, 64, 0))),
        ({1: 60, 4: 90, 8: 300}, ((1, 1, 4), (2, 64, 0))),
        ({1: 30, 4: 90, 8: 165}, ((1, 64, 0),)),
        ({1: 60, 4: 140, 8: 240}, ((1, 64, 4),)),
        ({}, ()),
    ],
)
def test_schedule_speculates_up_to_the_last_win(
    candidate: dict[int, float], expected: tuple[tuple[int, int, int], ...], speed_points: Callable[..., Any]
) -> None:
    speed = {"candidate": speed_points(candidate), "no_draft": speed_points({1: 43, 4: 130, 8: 237})}
    assert choose_schedule(speed, 4) == expected


def test_schedule_is_what_the_engine_accepts(speed_points: Callable[..., Any]) -> None:
    """Rows start at 1, do not overlap and leave no gap, at any break-even and beyond `max_requests`."""
    for last_win in (1, 2, 64, 100):
        rates = {level: (2.0 if level <= last_win else 0.5) for level in (1, 2, 64, 100, 128)}
        speed = {"candidate": speed_points(rates), "no_draft": speed_points(dict.fromkeys(rates, 1.0))}
        schedule = choose_schedule(speed, 3)
        assert schedule[0][:2] == (1, last_win)
        assert schedule[1][0] == last_win + 1 <= schedule[1][1]


@pytest.mark.parametrize(
    ("rates", "limit"),
    [
        ({1: 60, 4: 140, 8: 165}, 4),  # above 4 the schedule has K = 0, and nobody measured what that costs
        ({1: 60, 4: 128, 8: 236}, 1),  # 0.98x and 1.00x, but the schedule no longer drafts from 2 on
        ({1: 60, 4: 140, 8: 240}, None),
        ({1: 30, 4: 90, 8: 165}, 0),
        ({}, None),
    ],
)
def test_load_above_which_the_drafter_comes_out(rates: Any, limit: int | None, speed_points: Any) -> None:
    speed = {"candidate": speed_points(rates), "no_draft": speed_points({1: 43, 4: 130, 8: 237})}
    assert load_limit(speed, choose_schedule(speed, 4)) == limit


@pytest.mark.parametrize(
    ("scheduled", "limit"),
    [
        ({1: 60, 4: 125, 8: 230}, None),  # at least 0.95x of no draft at every load
        ({1: 60, 4: 125, 8: 220}, 4),
        ({1: 60, 4: 110, 8: 236}, 1),
    ],
)
def test_a_measured_schedule_is_taken_at_its_word(scheduled: Any, limit: int | None, speed_points: Any) -> None:
    plain = {1: 43, 4: 130, 8: 237}
    speed = {
        "candidate": speed_points({1: 60, 4: 100, 8: 165}),
        "no_draft": speed_points(plain),
        "scheduled": speed_points(scheduled),
        # The machine was a tenth slower by then: only what was measured beside it counts.
        "no_draft_beside": speed_points(plain),
    }
    assert load_limit(speed, choose_schedule(speed, 4)) == limit
    slower = {level: 1.1 * rate for level, rate in plain.items()}
    assert load_limit(speed | {"no_draft": speed_points(slower)}, choose_schedule(speed, 4)) == limit


def test_draft_tokens_of_a_load_are_vllms() -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    for schedule in (((1, 4, 3), (5, 64, 0)), ((1, 64, 3),), ((1, 1, 3), (2, 2, 0))):
        by_vllm = build_dynamic_sd_schedule_lookup([list(row) for row in schedule], 100, 3)
        assert [draft_tokens_at(schedule, load) for load in range(1, 101)] == by_vllm[1:]


def test_an_arm_that_is_slow_to_warm_is_not_called_slow(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first requests take a second each; what is measured does not hold them."""
    slow = [4]

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "late" and request.url.path == "/v1/chat/completions" and slow[0] > 0:
            slow[0] -= 1
            await asyncio.sleep(0.5)
        return engine.answer(request)

    arms = [ArmEndpoint(arm=name, url=f"http://{name}", model="m", num_draft_tokens=2) for name in ("late", "early")]
    settings = EvaluationSettings(slices={"a": 2}, speed_concurrency=(1, 4), speed_requests=2, speed_repeats=1)
    speed = measure_speed(arms, PROMPTS, settings=settings, transport=httpx.MockTransport(answer))
    assert slow[0] == 0
    assert all(point.ttft_p99_ms < 300 for point in speed["late"])


def test_speedups_leave_out_what_only_one_arm_has(speed_points: Callable[..., Any]) -> None:
    speed = {"candidate": speed_points({1: 60, 16: 1}), "no_draft": speed_points({1: 40})}
    assert speedups(speed) == {1: 1.5}
