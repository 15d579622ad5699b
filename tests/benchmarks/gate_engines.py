"""The gate's measurement on real engines: the demo target, with and without a drafter, as the demo
serves them.

The drafter is the checkpoint folder in DSPARK_BENCH_DRAFTER, else the demo's last training in the
state folder, else an untrained one, whose verdict is a plain fail.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from components.contracts import ArmEndpoint, CheckpointRef, TargetRef
from components.drafter.build import build_drafter
from components.drafter.checkpoint import export_checkpoint, load_checkpoint_ref
from components.evaluation.acceptance import Measured, expected_counters, measure_acceptance
from components.evaluation.prompts import Prompt, load_prompts
from components.evaluation.report import build_report
from components.evaluation.rules.asked import expected_loads
from components.evaluation.rules.decide import decide
from components.evaluation.speed import measure_speed
from components.services.endpoints import resolve_state_dir
from components.serving.engines.command import EngineSpec, resolve_device
from components.serving.engines.engine import start_engines
from components.settings import Recipe, load_recipe
from components.system.ports import free_port
from components.targets.resolve import resolve_target
from components.training.job import TrainingResult
from tests.benchmarks.loop_figures import at_least, at_most
from tests.benchmarks.run import Figure

NUM_GATES = 10
NUM_ROUNDS = 5
REQUESTS_IN_FLIGHT = 4


def engine_figures() -> list[Figure]:
    """Counters against requests, the cost of measuring, and the same gate ten times."""
    recipe = load_recipe("demo")
    prompts = load_prompts(recipe.evaluation)
    with (
        tempfile.TemporaryDirectory(prefix="bench") as name,
        _arms(recipe, Path(name)) as (target, arms),
    ):
        return [
            _counters(arms["candidate"], prompts, recipe),
            *_overhead(arms["no_draft"], prompts, recipe),
            _same_verdict(target, arms, prompts, recipe),
        ]


def _counters(candidate: ArmEndpoint, prompts: Sequence[Prompt], recipe: Recipe) -> Figure:
    """Tokens by which the engine's counters and its per-request metrics differ, over every
    counter.
    """
    measured = measure_acceptance(candidate, prompts, settings=recipe.evaluation)
    expected = expected_counters(measured.prompts)
    difference = sum(
        abs(measured.counters.get(counter, 0.0) - value) for counter, value in expected.items()
    )
    return at_most("counters_against_requests", difference, 0, "tokens")


def _overhead(plain: ArmEndpoint, prompts: Sequence[Prompt], recipe: Recipe) -> list[Figure]:
    """tok/s as the gate measures it over what a bare client gets, on the same prompts, round by
    round in turns.

    The speed measurement streams, because it takes times, and is set against a bare client that
    streams as well: what streaming costs the engine's own server is told apart from what measuring
    costs. That of acceptance warms up and settles its counters first, which is in its figure, too.
    """
    requests = len(prompts)
    settings = recipe.evaluation.model_copy(
        update={
            "speed_requests_in_flight": (REQUESTS_IN_FLIGHT,),
            "speed_requests": requests,
            "speed_repeats": 1,
        }
    )
    speed = []
    acceptance = []
    bare = []
    streamed = []
    for _ in range(NUM_ROUNDS):
        bare.append(asyncio.run(_bare_client(plain, prompts, recipe, streams=False)))
        streamed.append(asyncio.run(_bare_client(plain, prompts, recipe, streams=True)))
        speed.append(
            measure_speed([plain], prompts, settings=settings)["no_draft"][0].output_tokens_per_s
        )
        started = time.perf_counter()
        measured = measure_acceptance(plain, prompts, settings=settings)
        num_tokens = sum(prompt.num_output_tokens for prompt in measured.prompts)
        acceptance.append(num_tokens / (time.perf_counter() - started))
    return [
        at_least("speed_over_bare_client", _median_ratio(speed, bare), 0.97, "x"),
        at_least("speed_over_bare_streaming_client", _median_ratio(speed, streamed), 0.97, "x"),
        _told("bare_streaming_over_bare_client", _median_ratio(streamed, bare)),
        _told("acceptance_with_warm_up_over_bare_client", _median_ratio(acceptance, bare)),
    ]


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _told(name: str, value: float) -> Figure:
    return Figure(name=name, value=value, unit="x", goal="-", ok=True)


async def _bare_client(
    plain: ArmEndpoint, prompts: Sequence[Prompt], recipe: Recipe, *, streams: bool
) -> float:
    """tok/s of requests that are only sent and waited for."""
    settings = recipe.evaluation
    waiting = iter(prompts)
    num_tokens = 0
    async with httpx.AsyncClient(base_url=plain.url, timeout=300, trust_env=False) as client:

        async def lane() -> None:
            nonlocal num_tokens
            for prompt in waiting:
                payload = {
                    "model": plain.model,
                    "messages": list(prompt.messages),
                    "max_tokens": settings.max_tokens,
                    "temperature": settings.temperature,
                }
                answered = await (
                    _streamed(client, payload) if streams else _answered(client, payload)
                )
                # not in one line: the sum would be read before the wait, and lanes overwrite it
                num_tokens += answered

        started = time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(REQUESTS_IN_FLIGHT)))
        return num_tokens / (time.perf_counter() - started)


async def _answered(client: httpx.AsyncClient, payload: dict[str, Any]) -> int:
    response = await client.post("/v1/chat/completions", json=payload)
    return int(response.raise_for_status().json()["usage"]["completion_tokens"])


async def _streamed(client: httpx.AsyncClient, payload: dict[str, Any]) -> int:
    """Nothing of the stream is read but the tokens' number in its last event."""
    asked = payload | {"stream": True, "stream_options": {"include_usage": True}}
    last = ""
    async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
        async for line in response.raise_for_status().aiter_lines():
            last = line if '"usage":{' in line else last
    return int(json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"])


def _same_verdict(
    target: TargetRef, arms: dict[str, ArmEndpoint], prompts: Sequence[Prompt], recipe: Recipe
) -> Figure:
    """How many of ten gates over the same drafter say what most of them say, by every rule that
    they measure for.
    """
    settings = recipe.gate.model_copy(update={"max_train_served_gap": None, "min_speedup": None})
    verdicts = []
    for _ in range(NUM_GATES):
        measured = {
            arm: measure_acceptance(
                one, prompts, settings=recipe.evaluation, with_logprobs=arm == "no_draft"
            )
            for arm, one in arms.items()
        }
        loads = expected_loads(recipe, num_draft_tokens=arms["candidate"].num_draft_tokens)
        itself = {load: _again(arms["no_draft"], prompts, recipe, load) for load in loads}
        report = build_report(
            target, measured=measured, speed={}, prompts=prompts, recipe=recipe, itself=itself
        )
        verdicts.append(decide(report, settings=settings).verdict)
    verdict, count = Counter(verdicts).most_common(1)[0]
    return at_least(f"same_verdict_{verdict}", count, NUM_GATES, f"of_{NUM_GATES}_gates")


def _again(plain: ArmEndpoint, prompts: Sequence[Prompt], recipe: Recipe, load: int) -> Measured:
    settings = recipe.evaluation.model_copy(update={"acceptance_requests_in_flight": load})
    return measure_acceptance(plain, prompts, settings=settings, with_logprobs=True)


@contextmanager
def _arms(recipe: Recipe, folder: Path) -> Iterator[tuple[TargetRef, dict[str, ArmEndpoint]]]:
    target = resolve_target(recipe.target, cache_dir=folder, engine=recipe.engine)
    checkpoint = _drafter(recipe, target, folder)
    first = free_port()
    ports = (first, free_port(first + 1))
    specs = [
        EngineSpec(
            name=arm,
            model_path=target.path,
            served_model_name=target.name,
            settings=recipe.engine,
            port=port,
            device=resolve_device(recipe.engine),
            checkpoint=drafter,
        )
        for arm, port, drafter in zip(
            ("candidate", "no_draft"), ports, (checkpoint, None), strict=True
        )
    ]
    with start_engines(
        specs, log_dir=folder, fingerprint=target.fingerprint, allow_unbound=True
    ) as engines:
        yield target, {engine.spec.name: engine.endpoint(engine.spec.name) for engine in engines}


def _drafter(recipe: Recipe, target: TargetRef, folder: Path) -> CheckpointRef:
    given = os.environ.get("DSPARK_BENCH_DRAFTER")
    if given is not None:
        return load_checkpoint_ref(Path(given))
    trained = resolve_state_dir() / "latest" / recipe.target.name / "training.json"
    if trained.is_file():
        return load_checkpoint_ref(Path(TrainingResult.read(trained).checkpoint.path))
    model = build_drafter(
        recipe.drafter,
        target_path=Path(target.path),
        aux_layer_ids=recipe.stream.aux_layer_ids,
        draft_vocab=None,
        seed=0,
    )
    return export_checkpoint(
        model,
        folder / "untrained",
        target=target,
        settings=recipe.drafter,
        dataset_digest=None,
        step=0,
        num_trained_tokens=0,
        parent_digest=None,
        expected_acceptance_length=None,
        extra={},
    )
