"""Latency definitions and interleaving of arms."""

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
    inter_token_latencies_ms,
    measure_speed,
    round_prompts,
    speed_point,
    speedups,
)
from components.settings import EvaluationSettings

PROMPTS = tuple(
    Prompt(f"a/{n}", "a", ({"role": "user", "content": f"prompt {n}"},)) for n in range(2)
)


def test_chunks_of_several_tokens_count_per_token() -> None:
    assert inter_token_latencies_ms([(0.1, 1), (0.2, 2), (0.5, 5)]) == pytest.approx(
        [100, 100, 100, 100]
    )
    assert inter_token_latencies_ms([(0.1, 3)]) == []


def test_speed_point_takes_medians_over_rounds() -> None:
    rounds = [
        Round(2, rate, (10.0, ttft), (5.0,)) for rate, ttft in [(100, 10.0), (1, 90.0), (80, 30.0)]
    ]
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

    arms = [
        ArmEndpoint(arm=name, url=f"http://{name}", model="m", num_draft_tokens=2)
        for name in ("a", "b")
    ]
    settings = EvaluationSettings(
        slices={"a": 2}, speed_requests_in_flight=(1, 2), speed_requests=1, speed_repeats=2
    )
    speed = measure_speed(arms, PROMPTS, settings=settings, transport=httpx.MockTransport(note))
    assert "".join(order) == "abba" + "aabbbbaa"
    assert [point.requests_in_flight for point in speed["b"]] == [1, 2]
    assert [point.num_requests for point in speed["b"]] == [2, 4]
    assert all(point.output_tokens_per_s > 0 for point in speed["a"])


def test_every_round_asks_other_prompts_of_all_slices() -> None:
    """Twelve prompts of three slices, four requests: each round some of every slice, three rounds
    all twelve.
    """
    prompts = [
        Prompt(f"{name}/{n}", name, ({"role": "user", "content": "x"},))
        for name in "abc"
        for n in range(4)
    ]
    rounds = [round_prompts(prompts, 4, index) for index in range(3)]
    assert all({prompt.slice for prompt in one} == set("abc") for one in rounds)
    assert {prompt.prompt_id for one in rounds for prompt in one} == {
        prompt.prompt_id for prompt in prompts
    }
    assert {p.prompt_id for p in round_prompts(prompts, 4, 3)} == {p.prompt_id for p in rounds[0]}
    assert [p.prompt_id for p in round_prompts(PROMPTS, 3, 1)] == ["a/1", "a/0", "a/1"]


def test_arms_get_the_same_prompts_within_a_round(engine: Any) -> None:
    asked: dict[str, list[str]] = {"a": [], "b": []}

    def note(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/chat/completions" and json.loads(request.content).get("stream"):
            asked[request.url.host].append(json.loads(request.content)["messages"][0]["content"])
        return engine.answer(request)

    arms = [
        ArmEndpoint(arm=name, url=f"http://{name}", model="m", num_draft_tokens=2)
        for name in ("a", "b")
    ]
    settings = EvaluationSettings(
        slices={"a": 2}, speed_requests_in_flight=(1,), speed_requests=1, speed_repeats=4
    )
    speed = measure_speed(arms, PROMPTS, settings=settings, transport=httpx.MockTransport(note))
    assert asked["a"] == asked["b"] == ["prompt 0", "prompt 1", "prompt 0", "prompt 1"]
    assert [len(points[0].round_tokens_per_s) for points in speed.values()] == [4, 4]


def test_an_engine_that_fails_is_one_clear_error() -> None:
    broken = httpx.MockTransport(lambda request: httpx.Response(500, text="dead"))
    with pytest.raises(EvaluationError, match="HTTP 500: dead"):
        measure_speed(
            [ArmEndpoint(arm="a", url="http://a", model="m")],
            PROMPTS,
            settings=EvaluationSettings(slices={"a": 2}),
            transport=broken,
        )


def test_an_arm_that_is_slow_to_warm_is_not_called_slow(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first requests take a second each; what is measured does not hold them."""
    slow = [4]

    async def answer(request: httpx.Request) -> httpx.Response:
        if (
            request.url.host == "late"
            and request.url.path == "/v1/chat/completions"
            and slow[0] > 0
        ):
            slow[0] -= 1
            await asyncio.sleep(0.5)
        return engine.answer(request)

    arms = [
        ArmEndpoint(arm=name, url=f"http://{name}", model="m", num_draft_tokens=2)
        for name in ("late", "early")
    ]
    settings = EvaluationSettings(
        slices={"a": 2}, speed_requests_in_flight=(1, 4), speed_requests=2, speed_repeats=1
    )
    speed = measure_speed(arms, PROMPTS, settings=settings, transport=httpx.MockTransport(answer))
    assert slow[0] == 0
    assert all(point.ttft_p99_ms < 300 for point in speed["late"])


def test_speedups_leave_out_what_only_one_arm_has(speed_points: Callable[..., Any]) -> None:
    speed = {"candidate": speed_points({1: 60, 16: 1}), "no_draft": speed_points({1: 40})}
    assert speedups(speed) == {1: 1.5}
