"""Measurements that outlive an engine, of shorter drafts, of the shipped schedule, and of the
train-served gap.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from components.contracts import (
    Arm,
    ArmEndpoint,
    CheckpointRef,
    Progress,
    SpeedPoint,
    TargetRef,
    TrainServedGap,
)
from components.errors import EvaluationError
from components.evaluation.acceptance import Measured, measure_acceptance
from components.evaluation.draft_schedule import ratios_by_length
from components.evaluation.prompts import Prompt
from components.evaluation.report import MeasuredLength
from components.evaluation.served_answers import collect_answers
from components.evaluation.speed import measure_speed
from components.serving.engines.command import resolve_device
from components.serving.engines.pool import EnginePool
from components.settings import EvaluationSettings, Recipe
from components.system.child_lines import OnChildLine
from components.training.checks.gap_job import GapJob, run_gap

"""Arms of a gate; others are named where they are measured."""

MAX_REVIVALS = 2
"""An engine that dies more often while one arm is measured has another problem than bad luck."""
GAP_TIMEOUT_S = 3600.0

_LOG = logging.getLogger(__name__)


def measure_surviving(
    endpoint: ArmEndpoint,
    prompts: Sequence[Prompt],
    *,
    settings: EvaluationSettings,
    engines: EnginePool,
    journals: Path,
    request_timeout_s: float,
    with_logprobs: bool = False,
    name: str | None = None,
    progress: Progress | None = None,
) -> Measured:
    """`measure_acceptance`, going on where it was when the engine dies: it is started again, up to
    twice.

    Args:
        endpoint, prompts, settings, request_timeout_s, with_logprobs, progress: as
        `measure_acceptance`.
        engines: the pool that started the engine; another's engine is not started again.
        journals: folder of the files that keep what was measured.
        name: of this measurement's file, where an arm is measured more than once; None: the arm's.

    Raises:
        EvaluationError: as `measure_acceptance`, of an engine that lives or died too often.
        EngineError: it did not come up again.
    """
    served = (endpoint.checkpoint_digest or "plain")[:12]
    journal = journals / f"{name or endpoint.arm}-{served}-at-{settings.temperature:g}.jsonl"
    for num_revived in range(MAX_REVIVALS + 1):
        try:
            return measure_acceptance(
                endpoint,
                prompts,
                settings=settings,
                request_timeout_s=request_timeout_s,
                journal=journal,
                with_logprobs=with_logprobs,
                progress=progress,
            )
        except EvaluationError as error:
            engine = engines.revive(endpoint.url) if num_revived < MAX_REVIVALS else None
            if engine is None:
                raise
            _LOG.warning("the engine of arm %s died and is started again: %s", endpoint.arm, error)
            engine.wait_ready(progress=progress)

    raise AssertionError("unreachable: the last try returns or raises")


def at_temperature(settings: EvaluationSettings, temperature: float) -> EvaluationSettings:
    """The settings of a measurement at a further temperature."""
    return settings.model_copy(update={"temperatures": (temperature,)})


def sampled_prompts(prompts: Sequence[Prompt], settings: EvaluationSettings) -> Sequence[Prompt]:
    """The prompts of further temperatures and lengths: evenly over all, so some of every slice."""
    stride = max(1, len(prompts) // settings.num_sampled_prompts)
    return prompts[::stride][: settings.num_sampled_prompts]


def shorter_drafts(checkpoint: CheckpointRef, settings: EvaluationSettings) -> list[CheckpointRef]:
    """The checkpoint as it is served with each of the recipe's numbers of draft tokens below its
    own, longest first.
    """
    lengths = sorted(settings.draft_lengths, reverse=True)
    return [
        checkpoint.model_copy(update={"num_draft_tokens": length})
        for length in lengths
        if length < checkpoint.num_draft_tokens
    ]


def measure_length(
    shorter: ArmEndpoint,
    plain: ArmEndpoint,
    prompts: Sequence[Prompt],
    *,
    settings: EvaluationSettings,
    engines: EnginePool,
    journals: Path,
    request_timeout_s: float,
    progress: Progress | None = None,
) -> MeasuredLength:
    """Acceptance of a shorter draft over a few prompts, and its speed in turns with no draft.

    Raises:
        EvaluationError: as `measure_acceptance` and `measure_speed`.
    """
    arm = shorter.model_copy(update={"arm": f"draft_{shorter.num_draft_tokens}"})
    measured = measure_surviving(
        arm,
        sampled_prompts(prompts, settings),
        settings=settings,
        engines=engines,
        journals=journals,
        request_timeout_s=request_timeout_s,
        progress=progress,
    )
    speed = measure_speed(
        [arm, plain],
        prompts,
        settings=settings,
        request_timeout_s=request_timeout_s,
        progress=progress,
    )

    return MeasuredLength(measured, speed[arm.arm], speed[plain.arm])


def measured_ratios(
    speed: Mapping[str, Sequence[SpeedPoint]],
    candidate: CheckpointRef,
    lengths: Sequence[MeasuredLength],
) -> dict[int, dict[int, float]]:
    """Throughput over no draft by number of draft tokens and load, as
    `schedule.ratios_by_length`.
    """
    shorter: dict[int, Mapping[str, Sequence[SpeedPoint]]] = {
        one.measured.endpoint.num_draft_tokens: {
            Arm.CANDIDATE: one.speed,
            Arm.NO_DRAFT: one.no_draft_speed,
        }
        for one in lengths
    }
    return ratios_by_length(speed, candidate.num_draft_tokens, shorter)


def measure_scheduled(
    scheduled: ArmEndpoint,
    plain: ArmEndpoint,
    prompts: Sequence[Prompt],
    *,
    settings: EvaluationSettings,
    request_timeout_s: float,
    progress: Progress | None = None,
) -> Mapping[str, tuple[SpeedPoint, ...]]:
    """Speed of the shipped schedule and, interleaved with it, of no draft once more: only such two
    can be compared.
    """
    arms = [
        scheduled.model_copy(update={"arm": Arm.SCHEDULED}),
        plain.model_copy(update={"arm": Arm.NO_DRAFT_BESIDE}),
    ]
    return measure_speed(
        arms, prompts, settings=settings, request_timeout_s=request_timeout_s, progress=progress
    )


def peak_memory(endpoints: Sequence[ArmEndpoint], engines: EnginePool) -> dict[str, int]:
    """Peak resident memory of each arm's engine, bytes, of those that this pool runs."""
    found = {endpoint.arm: engines.at(endpoint.url) for endpoint in endpoints}
    return {arm: engine.peak_memory_bytes() for arm, engine in found.items() if engine is not None}


def measure_gap(
    endpoint: ArmEndpoint,
    prompts: Sequence[Prompt],
    *,
    target: TargetRef,
    checkpoint: CheckpointRef,
    recipe: Recipe,
    out_dir: Path,
    progress: Progress,
    on_line: OnChildLine,
) -> TrainServedGap:
    """A candidate teacher-forced, through reference decoding and as served, on some prompts of
    every slice.

    The first two run the target again, in a process of their own beside the engines.

    Raises:
        EvaluationError: the engine is gone, or serves no drafter.
        TrainingError: the comparison's process failed.
    """
    settings = recipe.evaluation
    stride = max(1, len(prompts) // settings.num_gap_prompts)
    answers = collect_answers(
        endpoint,
        prompts[::stride],
        settings=settings,
        request_timeout_s=recipe.engine.request_timeout_s,
        progress=progress,
    )

    job = GapJob(
        target=target,
        checkpoint=checkpoint,
        answers=answers,
        max_tokens=settings.max_tokens,
        dtype="float32" if recipe.engine.dtype == "float32" else "bfloat16",
        device=resolve_device(recipe.engine),
        output_dir=str(out_dir),
    )

    return run_gap(job, on_line=on_line, timeout_s=GAP_TIMEOUT_S)
