"""From measured arms to one `AcceptanceReport`. Pure: nothing is measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from components.contracts import (
    AcceptanceReport,
    Arm,
    ArmReport,
    CompatibilityTable,
    Divergence,
    DraftLengthReport,
    PromptMeasurement,
    SampledOutputs,
    SelfComparison,
    SpeedPoint,
    TargetRef,
    TemperatureReport,
    TrainServedGap,
    WarmPrefixPoint,
    now_utc,
)
from components.errors import EvaluationError
from components.evaluation.acceptance import Measured
from components.evaluation.outputs.greedy_answers import (
    GreedyAnswer,
    compare_with_itself,
    divergences,
)
from components.evaluation.prompts import Prompt, prompt_digest
from components.evaluation.rules.estimated import acceptance_sums, slices_of
from components.evaluation.statistics.ratios import Interval, estimate_ratio, ratio_of_sums
from components.settings import Recipe


@dataclass(frozen=True)
class MeasuredLength:
    """The candidate with fewer draft tokens than its own, and what no draft did in turns with
    it.
    """

    measured: Measured
    speed: tuple[SpeedPoint, ...]
    no_draft_speed: tuple[SpeedPoint, ...]


def build_report(
    target: TargetRef,
    *,
    measured: Mapping[str, Measured],
    speed: Mapping[str, Sequence[SpeedPoint]],
    prompts: Sequence[Prompt],
    recipe: Recipe,
    size: str | None = None,
    look: int = 1,
    itself: Mapping[int, Measured] | None = None,
    further: Mapping[float, Mapping[str, Measured]] | None = None,
    sampled_outputs: Sequence[SampledOutputs] = (),
    draft_lengths: Sequence[MeasuredLength] = (),
    warm_prefix: Sequence[WarmPrefixPoint] = (),
    compatibility: CompatibilityTable | None = None,
    train_served_gap: TrainServedGap | None = None,
    peak_memory_bytes: Mapping[str, int] | None = None,
) -> AcceptanceReport:
    """Put the measured arms of one target into a report, paired over the same prompts.

    Args:
        target: what was served.
        measured: by arm; 'candidate' must be there, 'champion', 'untrained' and 'no_draft' may.
        speed: by arm, from `measure_speed`; arms without points get none.
        prompts: as handed to `measure_acceptance` (the untrained arm may have seen fewer of them).
        recipe: as used while measuring.
        size: overlay of the recipe.
        look: how often the candidate was measured for a decision on this target, this included.
        itself: by requests in flight, 'no_draft' answering once more.
        further: by temperature and arm, what was measured at further temperatures, on fewer
            prompts.
        sampled_outputs: draws with the candidate and without a drafter.
        draft_lengths: the candidate with fewer draft tokens, on fewer prompts.
        warm_prefix: each arm on a long shared prefix.
        compatibility: kinds of request with the candidate and without a drafter.
        train_served_gap: of the candidate, where it was measured.
        peak_memory_bytes: by arm, of the engine's processes while they were measured.

    Raises:
        EvaluationError: no candidate, engines of different versions, or arms that answered
            different prompts.
    """
    if Arm.CANDIDATE not in measured:
        raise EvaluationError("no candidate arm was measured", got=", ".join(measured) or "no arm")
    versions = {arm.engine_version for arm in measured.values()}
    if len(versions) > 1:
        raise EvaluationError(
            "the arms ran on different engine versions", got=", ".join(sorted(versions))
        )

    excluded = {
        prompt_id: reason for arm in measured.values() for prompt_id, reason in arm.excluded.items()
    }
    kept = {arm: _without(one, excluded) for arm, one in measured.items()}
    _check_paired(kept)
    settings = recipe.evaluation
    num_equal, num_compared = _equal_outputs(kept, settings.temperature)

    return AcceptanceReport(
        target=target,
        recipe=recipe.name,
        size=size,
        look=look,
        dtype=recipe.engine.dtype,
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        prompt_digest=prompt_digest(prompts),
        arms=_arms(measured, kept, speed=speed, memory=peak_memory_bytes or {}),
        num_equal_outputs=num_equal,
        num_compared_outputs=num_compared,
        divergences=_divergences(measured, excluded) if num_compared else {},
        self_comparisons=_self_comparisons(measured, itself or {}, excluded),
        sampled_outputs=tuple(sampled_outputs),
        excluded=excluded,
        further_temperatures=tuple(
            _further(temperature, arms) for temperature, arms in (further or {}).items()
        ),
        draft_lengths=tuple(_shorter(one, excluded) for one in draft_lengths),
        warm_prefix=tuple(warm_prefix),
        compatibility=compatibility,
        train_served_gap=train_served_gap,
        engine_version=versions.pop(),
        created_at=now_utc(),
    )


def _divergences(
    measured: Mapping[str, Measured], excluded: Mapping[str, str]
) -> dict[str, Divergence]:
    """Where the candidate's greedy answers part from no_draft's."""
    plain, ours = (_answers(measured[arm], excluded) for arm in (Arm.NO_DRAFT, Arm.CANDIDATE))
    return divergences(plain, ours)


def _self_comparisons(
    measured: Mapping[str, Measured], itself: Mapping[int, Measured], excluded: Mapping[str, str]
) -> tuple[SelfComparison, ...]:
    if not itself:
        return ()
    plain = _answers(measured[Arm.NO_DRAFT], excluded)
    return tuple(
        compare_with_itself(plain, _answers(again, excluded), num_in_flight=load)
        for load, again in sorted(itself.items())
    )


def _answers(measured: Measured, excluded: Mapping[str, str]) -> dict[str, GreedyAnswer]:
    return {name: answer for name, answer in measured.answers.items() if name not in excluded}


def _arms(
    measured: Mapping[str, Measured],
    kept: Mapping[str, tuple[PromptMeasurement, ...]],
    *,
    speed: Mapping[str, Sequence[SpeedPoint]],
    memory: Mapping[str, int],
) -> dict[str, ArmReport]:
    arms = {
        arm: _arm_report(
            one, kept[arm], speed=tuple(speed.get(arm, ())), peak_memory_bytes=memory.get(arm)
        )
        for arm, one in measured.items()
    }
    # An arm that only its speed was measured of, like the shipped schedule.
    return arms | {
        arm: _speed_only(arm, tuple(points)) for arm, points in speed.items() if arm not in measured
    }


def _further(temperature: float, measured: Mapping[str, Measured]) -> TemperatureReport:
    excluded = {prompt_id: "" for arm in measured.values() for prompt_id in arm.excluded}
    kept = {arm: _without(one, excluded) for arm, one in measured.items()}
    if Arm.CANDIDATE in kept:
        _check_paired(kept)
    return TemperatureReport(
        temperature=temperature,
        arms={arm: _arm_report(one, kept[arm]) for arm, one in measured.items()},
    )


def _shorter(one: MeasuredLength, excluded: Mapping[str, str]) -> DraftLengthReport:
    kept = _without(one.measured, {**excluded, **one.measured.excluded})
    return DraftLengthReport(
        num_draft_tokens=one.measured.endpoint.num_draft_tokens,
        arm=_arm_report(one.measured, kept, speed=one.speed),
        no_draft_speed=one.no_draft_speed,
    )


def _arm_report(
    measured: Measured,
    prompts: tuple[PromptMeasurement, ...],
    *,
    speed: tuple[SpeedPoint, ...] = (),
    peak_memory_bytes: int | None = None,
) -> ArmReport:
    return arm_report(
        measured.endpoint.arm,
        prompts=prompts,
        speed=speed,
        checkpoint_digest=measured.endpoint.checkpoint_digest,
        num_draft_tokens=measured.endpoint.num_draft_tokens,
        engine_counters=measured.counters,
        peak_memory_bytes=peak_memory_bytes,
    )


def _speed_only(arm: str, speed: tuple[SpeedPoint, ...]) -> ArmReport:
    return arm_report(
        arm, prompts=(), speed=speed, checkpoint_digest=None, num_draft_tokens=0, engine_counters={}
    )


def arm_report(
    arm: str,
    *,
    prompts: tuple[PromptMeasurement, ...],
    speed: tuple[SpeedPoint, ...],
    checkpoint_digest: str | None,
    num_draft_tokens: int,
    engine_counters: dict[str, float],
    peak_memory_bytes: int | None = None,
) -> ArmReport:
    """Figures of one arm from its per-prompt measurements; see `ArmReport` for their
    definitions.
    """
    by_slice: dict[str, list[PromptMeasurement]] = {}
    for prompt in prompts:
        by_slice.setdefault(prompt.slice, []).append(prompt)

    intervals = {
        name: _interval(members, num_draft_tokens) for name, members in sorted(by_slice.items())
    }
    num_steps = sum(prompt.num_steps for prompt in prompts)
    accepted_at = [
        sum(prompt.accepted_by_position[k] for prompt in prompts) for k in range(num_draft_tokens)
    ]

    return ArmReport(
        arm=arm,
        checkpoint_digest=checkpoint_digest,
        acceptance_length=acceptance_length(prompts),
        acceptance_interval=_interval(prompts, num_draft_tokens),
        acceptance_by_slice={
            name: acceptance_length(members) for name, members in sorted(by_slice.items())
        },
        interval_by_slice={
            name: interval for name, interval in intervals.items() if interval is not None
        },
        acceptance_by_position=tuple(
            count / num_steps if num_steps else 0.0 for count in accepted_at
        ),
        draft_coverage=draft_coverage(prompts),
        prompts=prompts,
        speed=speed,
        engine_counters=engine_counters,
        acceptance_histogram=acceptance_histogram(prompts),
        peak_memory_bytes=peak_memory_bytes,
    )


def acceptance_length(prompts: Sequence[PromptMeasurement]) -> float:
    """sum(accepted + steps) / sum(steps): tokens per target step, bonus token included; 1.0 without
    any such step.
    """
    num, den = acceptance_sums(prompts)
    return ratio_of_sums(num, den) if den.sum() else 1.0


def paired_acceptance_lengths(
    old: Sequence[PromptMeasurement], new: Sequence[PromptMeasurement]
) -> tuple[float, float, int]:
    """Acceptance lengths over the prompts that both measurements have, and how many those are.

    Slices differ by far more than targets do: lengths over different prompts cannot be compared.
    """
    common = {prompt.prompt_id for prompt in old} & {prompt.prompt_id for prompt in new}

    def length(prompts: Sequence[PromptMeasurement]) -> float:
        return acceptance_length([prompt for prompt in prompts if prompt.prompt_id in common])

    return length(old), length(new), len(common)


def draft_coverage(prompts: Sequence[PromptMeasurement]) -> float:
    """Share of output tokens that came from target steps with a draft, 0 to 1.

    The first token of an answer comes from the prefill and never counts; the last step may commit
    more tokens than the answer keeps (its length limit cuts), so each prompt counts at most its own
    output.
    """
    covered = sum(min(p.num_steps + p.num_accepted_tokens, p.num_output_tokens) for p in prompts)
    num_output = sum(p.num_output_tokens for p in prompts)
    return covered / num_output if num_output else 0.0


def acceptance_histogram(prompts: Sequence[PromptMeasurement]) -> tuple[int, ...]:
    """Target steps that accepted exactly 0, 1, ... K draft tokens (drafts are accepted left to
    right).
    """
    num_positions = max((len(prompt.accepted_by_position) for prompt in prompts), default=0)
    if not num_positions:
        return ()
    at_least = [sum(prompt.num_steps for prompt in prompts)]
    at_least += [
        sum(prompt.accepted_by_position[k] for prompt in prompts) for k in range(num_positions)
    ]
    return tuple(low - high for low, high in pairwise([*at_least, 0]))


def _interval(prompts: Sequence[PromptMeasurement], num_draft_tokens: int) -> Interval | None:
    num, den = acceptance_sums(prompts)
    estimate = estimate_ratio(num, den, origin=1.0, strata=slices_of(prompts))
    if estimate is None:
        return None
    low, high = estimate.interval()
    # No step commits more than its drafts and the bonus token.
    return (
        low,
        min(high, num_draft_tokens + 1.0),
    )


def _without(measured: Measured, excluded: Mapping[str, str]) -> tuple[PromptMeasurement, ...]:
    """Measurements of one arm, less the prompts that any arm had to leave out: arms stay paired."""
    return tuple(prompt for prompt in measured.prompts if prompt.prompt_id not in excluded)


def _check_paired(kept: Mapping[str, tuple[PromptMeasurement, ...]]) -> None:
    candidate = {prompt.prompt_id for prompt in kept[Arm.CANDIDATE]}
    for arm, prompts in kept.items():
        ids = [prompt.prompt_id for prompt in prompts]
        same = set(ids) <= candidate if arm == Arm.UNTRAINED else set(ids) == candidate
        if not same or len(set(ids)) != len(ids):
            raise EvaluationError(
                f"arm '{arm}' did not answer the same prompts as the candidate, each once",
                got=f"{len(ids)} answers to {len(set(ids))} prompts",
                expected=f"{len(candidate)} prompts",
            )


def _equal_outputs(
    kept: Mapping[str, tuple[PromptMeasurement, ...]], temperature: float
) -> tuple[int, int]:
    """(equal, compared) outputs of candidate and no_draft; sampled outputs cannot be compared, so
    (0, 0) above 0.
    """
    if Arm.NO_DRAFT not in kept or temperature > 0:
        return 0, 0
    plain = {prompt.prompt_id: prompt.output_digest for prompt in kept[Arm.NO_DRAFT]}
    pairs = [(prompt.output_digest, plain[prompt.prompt_id]) for prompt in kept[Arm.CANDIDATE]]
    return sum(ours == theirs for ours, theirs in pairs), len(pairs)
