"""Throughput and latency of the served arms against requests in flight.

One arm at a time gets the machine. Within each number of requests in flight the arms alternate
round by round, and every second round runs them in reverse (A B, B A, A B, ...), so that a machine
that slows down or speeds up over the minutes hits all arms alike. A round sends the same prompts to
every arm, and other prompts than the round before: the rounds are the units that a speed-up is
judged by (`rounds.py`), and eight prompts asked again and again would speak for those eight.
Medians over the rounds are reported beside the rounds themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise

import httpx
import numpy as np

from components.contracts import Arm, ArmEndpoint, Progress, SpeedPoint
from components.errors import EvaluationError
from components.evaluation.engine_client import Completion, EngineClient, all_or_first_error
from components.evaluation.prompts import Prompt
from components.settings import EvaluationSettings


@dataclass(frozen=True)
class Round:
    """One arm, one number of requests in flight, one round."""

    num_requests: int
    output_tokens_per_s: float
    ttft_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]


def measure_speed(
    endpoints: Sequence[ArmEndpoint],
    prompts: Sequence[Prompt],
    *,
    settings: EvaluationSettings,
    request_timeout_s: float = 300,
    progress: Progress | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> dict[str, tuple[SpeedPoint, ...]]:
    """Measure every arm at every load of `settings.speed_requests_in_flight`, interleaved;
    points are in order of that load.

    Each round sends `max(speed_requests, requests in flight)` prompts, the same ones to all
    arms, so arms are compared on equal work. They are spread over all prompts, so of every
    slice, and move on by one from round to round. The engines must serve nobody else meanwhile.
    Must not be called from a running event loop.

    Raises:
        EvaluationError: no prompts, two arms of one name, an engine that fails or answers without a
            token.
    """
    if not prompts:
        raise EvaluationError("no prompts to measure speed on")
    if len({endpoint.arm for endpoint in endpoints}) != len(endpoints):
        raise EvaluationError(
            "two arms have the same name", got=", ".join(endpoint.arm for endpoint in endpoints)
        )

    clients = [
        EngineClient(
            endpoint,
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            timeout_s=request_timeout_s,
            transport=transport,
        )
        for endpoint in endpoints
    ]

    return asyncio.run(_measure(clients, prompts, settings, progress))


async def _measure(
    clients: Sequence[EngineClient],
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    progress: Progress | None,
) -> dict[str, tuple[SpeedPoint, ...]]:
    """Every round is planned before the first begins, so that arms alternate and progress knows its
    total.
    """
    levels = sorted(set(settings.speed_requests_in_flight))
    plan = [
        (
            requests_in_flight,
            client,
            round_prompts(prompts, max(settings.speed_requests, requests_in_flight), index),
        )
        for requests_in_flight in levels
        for index in range(settings.speed_repeats)
        for client in (clients if index % 2 == 0 else reversed(clients))
    ]

    rounds: dict[tuple[str, int], list[Round]] = {}
    async with AsyncExitStack() as stack:
        for client in clients:
            await stack.enter_async_context(client)
            await client.warm_up(num_requests=max(levels))
        for num_done, (requests_in_flight, client, chosen) in enumerate(plan, start=1):
            key = (client.endpoint.arm, requests_in_flight)
            rounds.setdefault(key, []).append(await _round(client, chosen, requests_in_flight))
            if progress is not None:
                progress(f"{key[0]} at {requests_in_flight} in flight", num_done, len(plan))

    return {
        client.endpoint.arm: tuple(
            speed_point(level, rounds[client.endpoint.arm, level]) for level in levels
        )
        for client in clients
    }


def round_prompts(prompts: Sequence[Prompt], num_requests: int, index: int) -> list[Prompt]:
    """The prompts of round `index` (from 0): every so many-th of all, from the `index`-th on.

    Prompts are in order of their slices, so a round holds some of every slice; rounds repeat
    prompts only when all have been asked. Fewer prompts than requests are asked in turn.
    """
    stride = max(1, len(prompts) // num_requests)
    return [prompts[(index + stride * place) % len(prompts)] for place in range(num_requests)]


async def _round(client: EngineClient, prompts: Sequence[Prompt], requests_in_flight: int) -> Round:
    """One arm's prompts at one load. Lanes share the prompts, so that the load stays up until they
    run out.
    """
    waiting = iter(prompts)
    answers: list[Completion] = []

    async def one_in_flight() -> None:
        # Lanes share one iterator: a lane takes the next prompt as soon as its last answer is
        # there.
        for prompt in waiting:
            answers.append(await client.stream(prompt))

    started = time.perf_counter()
    await all_or_first_error(one_in_flight() for _ in range(requests_in_flight))
    duration_s = time.perf_counter() - started
    if not all(answer.token_times for answer in answers):
        raise EvaluationError(
            f"arm '{client.endpoint.arm}' answered a request without a single token"
        )
    return Round(
        num_requests=len(answers),
        output_tokens_per_s=sum(answer.num_output_tokens for answer in answers) / duration_s,
        ttft_ms=tuple(answer.token_times[0][0] * 1e3 for answer in answers),
        itl_ms=tuple(
            latency
            for answer in answers
            for latency in inter_token_latencies_ms(answer.token_times)
        ),
    )


def inter_token_latencies_ms(token_times: Sequence[tuple[float, int]]) -> list[float]:
    """Milliseconds per token after the first, one value per token.

    A chunk of m tokens that comes t after the chunk before it gives m values of t / m: a drafter's
    several tokens per step count as what they are worth to a reader, not as one long gap and some
    of zero.

    Args:
        token_times: (seconds since the request, tokens so far) at each chunk.
    """
    latencies: list[float] = []
    for (earlier_s, tokens_before), (later_s, tokens_after) in pairwise(token_times):
        num_new = tokens_after - tokens_before
        latencies += [(later_s - earlier_s) * 1e3 / num_new] * num_new
    return latencies


def speed_point(requests_in_flight: int, rounds: Sequence[Round]) -> SpeedPoint:
    """Medians over `rounds` of throughput and of the per-round latency percentiles."""

    def median_of(percentile: float, samples: Sequence[tuple[float, ...]]) -> float:
        per_round = [float(np.percentile(sample, percentile)) for sample in samples if sample]
        return float(np.median(per_round)) if per_round else 0.0

    ttft, itl = [r.ttft_ms for r in rounds], [r.itl_ms for r in rounds]
    return SpeedPoint(
        requests_in_flight=requests_in_flight,
        num_requests=sum(r.num_requests for r in rounds),
        output_tokens_per_s=float(np.median([r.output_tokens_per_s for r in rounds])),
        ttft_p50_ms=median_of(50, ttft),
        ttft_p99_ms=median_of(99, ttft),
        itl_p50_ms=median_of(50, itl),
        itl_p99_ms=median_of(99, itl),
        round_tokens_per_s=tuple(r.output_tokens_per_s for r in rounds),
    )


def speedups(
    speed: Mapping[str, Sequence[SpeedPoint]], *, arm: str = Arm.CANDIDATE, over: str = Arm.NO_DRAFT
) -> dict[int, float]:
    """Throughput of `arm` over that of `over` at each load both were measured at."""
    base = {point.requests_in_flight: point.output_tokens_per_s for point in speed.get(over, ())}
    return {
        point.requests_in_flight: point.output_tokens_per_s / base[point.requests_in_flight]
        for point in sorted(speed.get(arm, ()), key=lambda point: point.requests_in_flight)
        if base.get(point.requests_in_flight, 0.0) > 0
    }
