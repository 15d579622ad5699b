"""Per-prompt figures of arms as arrays, and rule results that rest on an estimate. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from components.contracts import ArmReport, PromptMeasurement, RuleResult, Verdict
from components.errors import EvaluationError
from components.evaluation.rules.looks import next_level
from components.evaluation.statistics.estimate import Array, Estimate, Interval
from components.evaluation.statistics.power import prompts_needed
from components.settings import GateSettings


def acceptance_sums(prompts: Sequence[PromptMeasurement]) -> tuple[Array, Array]:
    """Per prompt, [P] each: tokens committed by speculative steps (accepted + steps), and those
    steps.
    """
    num = np.array(
        [prompt.num_accepted_tokens + prompt.num_steps for prompt in prompts], dtype=float
    )
    return num, np.array([prompt.num_steps for prompt in prompts], dtype=float)


def position_sums(prompts: Sequence[PromptMeasurement], position: int) -> tuple[Array, Array]:
    """Per prompt, [P] each: drafts accepted at `position` (from 1), and at the one before it (the
    first: steps).
    """
    accepted = np.array(
        [(prompt.num_steps, *prompt.accepted_by_position) for prompt in prompts], dtype=float
    )
    return accepted[:, position], accepted[:, position - 1]


def slices_of(prompts: Sequence[PromptMeasurement]) -> list[str]:
    """[P] slice of each prompt."""
    return [prompt.slice for prompt in prompts]


def in_order(arm: ArmReport) -> list[PromptMeasurement]:
    """Prompts of an arm by id, so that two arms pair up by position."""
    return sorted(arm.prompts, key=lambda prompt: prompt.prompt_id)


def paired_prompts(
    ours: ArmReport, theirs: ArmReport
) -> tuple[list[PromptMeasurement], list[PromptMeasurement]]:
    """Prompts of two arms in one order.

    Raises:
        EvaluationError: they did not answer the same prompts.
    """
    pair = in_order(ours), in_order(theirs)
    if [(p.slice, p.prompt_id) for p in pair[0]] != [(p.slice, p.prompt_id) for p in pair[1]]:
        raise EvaluationError(
            f"{ours.arm} and {theirs.arm} did not answer the same prompts; they cannot be compared",
            got=f"{len(pair[0])} and {len(pair[1])} prompts",
        )
    return pair


def members_of(prompts: Sequence[PromptMeasurement], slice_name: str) -> list[PromptMeasurement]:
    """The prompts of one slice, in the order they are in."""
    return [prompt for prompt in prompts if prompt.slice == slice_name]


def num_counted(estimate: Estimate | None, num_prompts: int) -> int:
    """Prompts behind an estimate: those without a step count for nothing."""
    return num_prompts if estimate is None else min(num_prompts, estimate.num_prompts)


def pass_if_enough(
    verdict: Verdict, estimate: Estimate | None, num_prompts: int, settings: GateSettings
) -> tuple[Verdict, str]:
    """The verdict, and a note where fewer than `min_prompts_per_slice` prompts count: such are
    never a pass.
    """
    if num_counted(estimate, num_prompts) >= settings.min_prompts_per_slice:
        return verdict, ""
    note = f"fewer than {settings.min_prompts_per_slice} prompts"
    return Verdict.INCONCLUSIVE if verdict is Verdict.PASS else verdict, note


def estimated_rule(
    rule: str,
    estimate: Estimate | None,
    verdict: Verdict,
    *,
    threshold: float,
    alpha: float,
    num_prompts: int,
    settings: GateSettings,
    bootstrap: Interval | None = None,
    p_values: dict[str, float] | None = None,
    binding: bool = True,
    note: str = "",
) -> RuleResult:
    """A rule result with its interval at the level it was judged by and, where undecided, the
    prompts it still needs.

    Args:
        rule, verdict, threshold, num_prompts, p_values, binding: as in `RuleResult`.
        estimate: behind the verdict; None when nothing can be said.
        alpha: one-sided level of this look, so the interval is one of 1 - 2 alpha. What is still
            needed is planned for the level of the next look.
        settings: limit of further prompts, and the least number of prompts.
        bootstrap: BCa interval of the same level.
        note: further words for `detail`.
    """
    confidence = 1 - 2 * alpha
    counted = num_counted(estimate, num_prompts)
    interval = _finite(estimate.interval(confidence)) if estimate else None
    needed = _further_prompts(
        estimate, verdict, threshold, alpha=alpha, num_prompts=counted, settings=settings
    )
    words = [_interval_words(interval, confidence, counted), note]

    if verdict is Verdict.INCONCLUSIVE:
        words.append(_needed_words(needed, settings.max_further_prompts))
    return RuleResult(
        rule=rule,
        verdict=verdict,
        value=estimate.value if estimate else None,
        threshold=threshold,
        detail="; ".join(word for word in words if word),
        interval=interval,
        confidence=confidence if interval else None,
        bootstrap_interval=_finite(bootstrap),
        p_values=p_values or {},
        binding=binding,
        num_prompts=counted,
        num_further_prompts=needed,
    )


def _further_prompts(
    estimate: Estimate | None,
    verdict: Verdict,
    threshold: float,
    *,
    alpha: float,
    num_prompts: int,
    settings: GateSettings,
) -> int | None:
    if verdict is not Verdict.INCONCLUSIVE:
        return None
    needed = prompts_needed(estimate, threshold, alpha=next_level(alpha, settings))
    if needed is None:
        return None
    return max(needed, settings.min_prompts_per_slice, num_prompts + 1) - num_prompts


def _needed_words(needed: int | None, limit: int) -> str:
    if needed is None:
        return "no number of prompts can be named"
    if needed > limit:
        return f"about {needed:,} more prompts would decide it, beyond the limit of {limit:,}"
    return f"about {needed:,} more prompt{'s' if needed > 1 else ''} would decide it"


def _finite(interval: Interval | None) -> Interval | None:
    return interval if interval is not None and all(map(math.isfinite, interval)) else None


def _interval_words(interval: Interval | None, confidence: float, num_prompts: int) -> str:
    prompts = f"{num_prompts} prompt{'s' if num_prompts != 1 else ''}"
    if interval is None:
        return f"no interval from {prompts}"
    return (
        f"{100 * confidence:.3g} % interval {interval[0]:.3f} to {interval[1]:.3f} over {prompts}"
    )
