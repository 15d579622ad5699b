"""Rules on the candidate alone, and against decoding without a drafter. Pure; each names the numbers it used."""

from __future__ import annotations

import math

from components.contracts import (
    AcceptanceReport,
    ArmReport,
    RuleResult,
    SpeedPoint,
    TargetFingerprint,
    TrainServedGap,
    Verdict,
)
from components.evaluation.bootstrap import bootstrap_ratio
from components.evaluation.measure import draft_coverage
from components.evaluation.paired import acceptance_sums, estimated_rule, slices_of
from components.evaluation.speed import speedups
from components.evaluation.statistics import estimate_ratio, threshold_verdict
from components.settings import GateSettings

FUTILE_SHARE = 0.1
"""Of the drafts per step asked for: a drafter accepted less often than that is not a matter of more prompts."""


def finite_figures(report: AcceptanceReport) -> RuleResult:
    """Every figure of every arm is a finite number: a comparison with NaN is false and must not look like a verdict."""
    arms = dict(report.arms)
    for further in report.further_temperatures:
        arms |= {f"{arm} at {further.temperature:g}": one for arm, one in further.arms.items()}
    broken = [f"{arm}.{name}" for arm, one in arms.items() for name, x in _figures(one) if not math.isfinite(x)]
    gap = report.train_served_gap
    if gap is not None and not all(map(math.isfinite, (gap.teacher_forced, gap.reference, gap.served))):
        broken.append("train_served_gap")
    return RuleResult(
        rule="finite figures",
        verdict=Verdict.FAIL if broken else Verdict.PASS,
        value=len(broken),
        threshold=0,
        detail=f"not finite: {', '.join(broken)}" if broken else "all figures of all arms are finite",
    )


def _figures(arm: ArmReport) -> list[tuple[str, float]]:
    figures = [("acceptance_length", arm.acceptance_length), ("draft_coverage", arm.draft_coverage)]
    figures += [("acceptance_interval", end) for end in arm.acceptance_interval or ()]
    figures += [(f"acceptance_by_slice.{name}", value) for name, value in arm.acceptance_by_slice.items()]
    figures += [(f"acceptance_by_position.{k}", value) for k, value in enumerate(arm.acceptance_by_position, start=1)]
    figures += [(f"latency of {prompt.prompt_id}", prompt.latency_s) for prompt in arm.prompts]
    return figures + [(f"tok/s at {point.concurrency}", point.output_tokens_per_s) for point in arm.speed]


def same_target(report: AcceptanceReport, expected: TargetFingerprint) -> RuleResult:
    """The report is about the target the decision is wanted for."""
    ours, theirs = report.target.fingerprint.model_dump(), expected.model_dump()
    different = [part for part in ours if ours[part] != theirs[part]]
    return RuleResult(
        rule="target fingerprint",
        verdict=Verdict.FAIL if different else Verdict.PASS,
        value=len(different),
        threshold=0,
        detail=f"measured on another target: {', '.join(different)} differ" if different else "measured on this target",
    )


def min_acceptance(arm: ArmReport, threshold: float, settings: GateSettings, *, name: str) -> RuleResult:
    """The acceptance length over all slices, recomputed from the prompts, is shown to reach the threshold.

    A drafter of which next to nothing was accepted has no interval worth the name: one prompt with a lucky draft is
    all its variance. So futility is a fail by itself: less than a tenth of the drafts per step that are asked for.
    """
    num, den = acceptance_sums(arm.prompts)
    strata = slices_of(arm.prompts)
    estimate = estimate_ratio(num, den, origin=1.0, strata=strata)
    verdict = threshold_verdict(estimate, threshold, alpha=settings.alpha)
    is_short = len(arm.prompts) < settings.min_prompts_per_slice
    if is_short and verdict is Verdict.PASS:
        verdict = Verdict.INCONCLUSIVE
    is_futile = estimate is not None and estimate.value - 1 < FUTILE_SHARE * (threshold - 1) and not is_short
    note = "no target step had a draft" if not den.sum() else "next to nothing was accepted" if is_futile else ""
    bootstrap = bootstrap_ratio(
        num, den, num_samples=settings.bootstrap_samples, seed=settings.seed, confidence=1 - 2 * settings.alpha,
        strata=strata,
    )  # fmt: skip
    return estimated_rule(
        name,
        estimate,
        # No step with a draft: there is a drafter and it did nothing, which is a failure, not a lack of data.
        Verdict.FAIL if is_futile or not den.sum() else verdict,
        threshold=threshold,
        alpha=settings.alpha,
        num_prompts=len(arm.prompts),
        settings=settings,
        bootstrap=bootstrap,
        note=note,
    )


def coverage(candidate: ArmReport, settings: GateSettings) -> RuleResult:
    """The drafter is at work: output tokens come from target steps with a draft."""
    value = draft_coverage(candidate.prompts)
    return RuleResult(
        rule="draft coverage",
        verdict=Verdict.PASS if value >= settings.min_draft_coverage else Verdict.FAIL,
        value=value,
        threshold=settings.min_draft_coverage,
        detail="share of output tokens from target steps with a draft",
    )


def speedup_at_serving(report: AcceptanceReport, settings: GateSettings) -> RuleResult | None:
    """tok/s over no draft at the serving concurrency; None without a limit in the recipe.

    The medians decide where all interleaved rounds agree with them; rounds on both sides of the limit are no verdict,
    since one more round could turn it.
    """
    if settings.min_speedup is None:
        return None
    level, limit = settings.serving_concurrency, settings.min_speedup
    value = speedups({arm: one.speed for arm, one in report.arms.items()}).get(level)
    verdict, detail = Verdict.INCONCLUSIVE, f"speed of candidate and no_draft at {level} was not measured"
    if value is not None:
        ratios = _round_ratios(report.arms["candidate"].speed, report.arms["no_draft"].speed, level) or [value]
        sides = {ratio >= limit for ratio in (*ratios, value)}
        if len(sides) == 1:
            verdict = Verdict.PASS if sides == {True} else Verdict.FAIL
        detail = f"tok/s over no draft; {len(ratios)} rounds from {min(ratios):.2f}x to {max(ratios):.2f}x"
    return RuleResult(
        rule=f"speed-up at {level} in flight", verdict=verdict, value=value, threshold=limit, detail=detail
    )


def _round_ratios(ours: tuple[SpeedPoint, ...], theirs: tuple[SpeedPoint, ...], level: int) -> list[float]:
    rounds = [point.round_tokens_per_s for arm in (ours, theirs) for point in arm if point.concurrency == level]
    return [a / b for a, b in zip(*rounds, strict=False) if b > 0] if len(rounds) == 2 else []


def train_served(gap: TrainServedGap | None, settings: GateSettings) -> RuleResult | None:
    """Teacher-forced, reference and served acceptance agree on the same prompts; None without a limit in the recipe."""
    if settings.max_train_served_gap is None:
        return None
    value, verdict, detail = None, Verdict.INCONCLUSIVE, "not measured"
    if gap is not None:
        value = gap.gap
        verdict = Verdict.PASS if value <= settings.max_train_served_gap else Verdict.FAIL
        detail = f"teacher-forced {gap.teacher_forced:.3f}, reference {gap.reference:.3f}, served {gap.served:.3f}"
        detail += f" over {gap.num_prompts} prompts"
        if gap.diverging_position is not None:
            detail += f"; they differ most at draft position {gap.diverging_position}"
    return RuleResult(
        rule="train-served gap", verdict=verdict, value=value, threshold=settings.max_train_served_gap, detail=detail
    )


def memory(report: AcceptanceReport, settings: GateSettings) -> RuleResult | None:
    """Peak memory of the candidate's engine over no draft's; None without a limit in the recipe."""
    if settings.max_memory_growth is None:
        return None
    arms = [report.arms.get(arm) for arm in ("candidate", "no_draft")]
    ours, plain = (arm.peak_memory_bytes if arm is not None else None for arm in arms)
    value, verdict, detail = None, Verdict.INCONCLUSIVE, "not measured for both arms"
    if ours and plain:
        value = ours / plain - 1
        verdict = Verdict.PASS if value <= settings.max_memory_growth else Verdict.FAIL
        detail = f"peak {ours / 2**30:.2f} GiB against {plain / 2**30:.2f} GiB without a drafter"
    return RuleResult(rule="memory", verdict=verdict, value=value, threshold=settings.max_memory_growth, detail=detail)
