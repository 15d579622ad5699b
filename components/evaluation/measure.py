"""From measured arms to one `AcceptanceReport`. Pure: nothing is measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from components.contracts import AcceptanceReport, ArmReport, PromptMeasurement, SpeedPoint, TargetRef, now_utc
from components.errors import EvaluationError
from components.evaluation.acceptance import Measured
from components.evaluation.prompts import Prompt, prompt_digest
from components.evaluation.statistics import Array, Interval, ratio_interval, ratio_of_sums
from components.settings import EvaluationSettings


def build_report(
    target: TargetRef,
    *,
    measured: Mapping[str, Measured],
    speed: Mapping[str, Sequence[SpeedPoint]],
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
) -> AcceptanceReport:
    """Put the measured arms of one target into a report, paired over the same prompts.

    Args:
        target: what was served.
        measured: by arm; 'candidate' must be there, 'champion', 'untrained' and 'no_draft' may.
        speed: by arm, from `measure_speed`; arms without points get none.
        prompts: as handed to `measure_acceptance` (the untrained arm may have seen fewer of them).
        settings: as used while measuring.

    Raises:
        EvaluationError: no candidate, engines of different versions, or arms that answered different prompts.
    """
    if "candidate" not in measured:
        raise EvaluationError("no candidate arm was measured", got=", ".join(measured) or "no arm")
    versions = {arm.engine_version for arm in measured.values()}
    if len(versions) > 1:
        raise EvaluationError("the arms ran on different engine versions", got=", ".join(sorted(versions)))
    excluded = {prompt_id: reason for arm in measured.values() for prompt_id, reason in arm.excluded.items()}
    kept = {arm: _without(one, excluded) for arm, one in measured.items()}
    _check_paired(kept)
    num_equal, num_compared = _equal_outputs(kept, settings.temperature)
    return AcceptanceReport(
        target=target,
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        prompt_digest=prompt_digest(prompts),
        arms={
            arm: arm_report(
                arm,
                prompts=kept[arm],
                speed=tuple(speed.get(arm, ())),
                checkpoint_digest=one.endpoint.checkpoint_digest,
                num_draft_tokens=one.endpoint.num_draft_tokens,
                engine_counters=one.counters,
                settings=settings,
            )
            for arm, one in measured.items()
        },
        num_equal_outputs=num_equal,
        num_compared_outputs=num_compared,
        excluded=excluded,
        engine_version=versions.pop(),
        created_at=now_utc(),
    )


def arm_report(
    arm: str,
    *,
    prompts: tuple[PromptMeasurement, ...],
    speed: tuple[SpeedPoint, ...],
    checkpoint_digest: str | None,
    num_draft_tokens: int,
    engine_counters: dict[str, float],
    settings: EvaluationSettings,
) -> ArmReport:
    """Figures of one arm from its per-prompt measurements; see `ArmReport` for their definitions."""
    by_slice: dict[str, list[PromptMeasurement]] = {}
    for prompt in prompts:
        by_slice.setdefault(prompt.slice, []).append(prompt)
    intervals = {name: _interval(members, settings) for name, members in sorted(by_slice.items())}
    num_steps = sum(prompt.num_steps for prompt in prompts)
    accepted_at = [sum(prompt.accepted_by_position[k] for prompt in prompts) for k in range(num_draft_tokens)]
    return ArmReport(
        arm=arm,
        checkpoint_digest=checkpoint_digest,
        acceptance_length=acceptance_length(prompts),
        acceptance_interval=_interval(prompts, settings),
        acceptance_by_slice={name: acceptance_length(members) for name, members in sorted(by_slice.items())},
        interval_by_slice={name: interval for name, interval in intervals.items() if interval is not None},
        acceptance_by_position=tuple(count / num_steps if num_steps else 0.0 for count in accepted_at),
        draft_coverage=draft_coverage(prompts),
        prompts=prompts,
        speed=speed,
        engine_counters=engine_counters,
    )


def acceptance_length(prompts: Sequence[PromptMeasurement]) -> float:
    """sum(accepted + steps) / sum(steps): tokens per target step, bonus token included; 1.0 without any such step."""
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


def acceptance_sums(prompts: Sequence[PromptMeasurement]) -> tuple[Array, Array]:
    """Per prompt, [P] each: tokens committed by speculative steps (accepted + steps), and those steps."""
    num = np.array([prompt.num_accepted_tokens + prompt.num_steps for prompt in prompts], dtype=float)
    return num, np.array([prompt.num_steps for prompt in prompts], dtype=float)


def draft_coverage(prompts: Sequence[PromptMeasurement]) -> float:
    """Share of output tokens that came from target steps with a draft, 0 to 1.

    The first token of an answer comes from the prefill and never counts; the last step may commit more tokens than
    the answer keeps (its length limit cuts), so each prompt counts at most its own output.
    """
    covered = sum(min(p.num_steps + p.num_accepted_tokens, p.num_output_tokens) for p in prompts)
    num_output = sum(p.num_output_tokens for p in prompts)
    return covered / num_output if num_output else 0.0


def _interval(prompts: Sequence[PromptMeasurement], settings: EvaluationSettings) -> Interval | None:
    num, den = acceptance_sums(prompts)
    return ratio_interval(num, den, num_samples=settings.bootstrap_samples, seed=settings.seed)


def _without(measured: Measured, excluded: Mapping[str, str]) -> tuple[PromptMeasurement, ...]:
    """Measurements of one arm, less the prompts that any arm had to leave out: arms stay paired."""
    return tuple(prompt for prompt in measured.prompts if prompt.prompt_id not in excluded)


def _check_paired(kept: Mapping[str, tuple[PromptMeasurement, ...]]) -> None:
    candidate = {prompt.prompt_id for prompt in kept["candidate"]}
    for arm, prompts in kept.items():
        ids = [prompt.prompt_id for prompt in prompts]
        same = set(ids) <= candidate if arm == "untrained" else set(ids) == candidate
        if not same or len(set(ids)) != len(ids):
            raise EvaluationError(
                f"arm '{arm}' did not answer the same prompts as the candidate, each once",
                got=f"{len(ids)} answers to {len(set(ids))} prompts",
                expected=f"{len(candidate)} prompts",
            )


def _equal_outputs(kept: Mapping[str, tuple[PromptMeasurement, ...]], temperature: float) -> tuple[int, int]:
    """(equal, compared) outputs of candidate and no_draft; sampled outputs cannot be compared, so (0, 0) above 0."""
    if "no_draft" not in kept or temperature > 0:
        return 0, 0
    plain = {prompt.prompt_id: prompt.output_digest for prompt in kept["no_draft"]}
    pairs = [(prompt.output_digest, plain[prompt.prompt_id]) for prompt in kept["candidate"]]
    return sum(ours == theirs for ours, theirs in pairs), len(pairs)
