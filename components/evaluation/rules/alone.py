"""Rules on the candidate alone, and against decoding without a drafter. Pure; each names the
numbers it used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from components.contracts import (
    AcceptanceReport,
    Arm,
    ArmReport,
    RuleResult,
    SpeedPoint,
    TargetFingerprint,
    TrainServedGap,
    Verdict,
)
from components.evaluation.report import draft_coverage
from components.evaluation.rounds import estimate_speedup, rounds_needed
from components.evaluation.rules.estimated import (
    acceptance_sums,
    estimated_rule,
    num_counted,
    pass_if_enough,
    slices_of,
)
from components.evaluation.rules.looks import next_level
from components.evaluation.speed import speedups
from components.evaluation.statistics.bootstrap import bootstrap_ratio
from components.evaluation.statistics.estimate import threshold_verdict
from components.evaluation.statistics.ratios import estimate_ratio
from components.settings import GateSettings

FUTILE_SHARE = 0.1
"""Of the drafts per step asked for: a drafter accepted less often than that is not a matter of more
prompts.
"""


def finite_figures(report: AcceptanceReport) -> RuleResult:
    """Every figure of every arm is a finite number: a comparison with NaN is false and must not
    look like a verdict.
    """
    arms = dict(report.arms)
    for further in report.further_temperatures:
        arms |= {f"{arm} at {further.temperature:g}": one for arm, one in further.arms.items()}

    broken = [
        f"{arm}.{name}"
        for arm, one in arms.items()
        for name, x in _figures(one)
        if not math.isfinite(x)
    ]
    gap = report.train_served_gap

    if gap is not None and not all(
        map(math.isfinite, (gap.teacher_forced, gap.reference, gap.served))
    ):
        broken.append("train_served_gap")

    return RuleResult(
        rule="finite figures",
        verdict=Verdict.FAIL if broken else Verdict.PASS,
        value=len(broken),
        threshold=0,
        detail=f"not finite: {', '.join(broken)}"
        if broken
        else "all figures of all arms are finite",
    )


def _figures(arm: ArmReport) -> list[tuple[str, float]]:
    figures = [("acceptance_length", arm.acceptance_length), ("draft_coverage", arm.draft_coverage)]
    figures += [("acceptance_interval", end) for end in arm.acceptance_interval or ()]
    figures += [
        (f"acceptance_by_slice.{name}", value) for name, value in arm.acceptance_by_slice.items()
    ]
    figures += [
        (f"acceptance_by_position.{k}", value)
        for k, value in enumerate(arm.acceptance_by_position, start=1)
    ]

    figures += [
        (f"interval_by_slice.{name}", end)
        for name, ends in arm.interval_by_slice.items()
        for end in ends
    ]
    figures += [(f"latency of {prompt.prompt_id}", prompt.latency_s) for prompt in arm.prompts]

    return figures + [figure for point in arm.speed for figure in _speed_figures(point)]


def _speed_figures(point: SpeedPoint) -> list[tuple[str, float]]:
    at = f"at {point.requests_in_flight}"
    figures = [(f"tok/s {at}", point.output_tokens_per_s)]
    figures += [
        (f"tok/s {at}, round {k}", rate) for k, rate in enumerate(point.round_tokens_per_s, start=1)
    ]
    latencies = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
    return figures + [(f"{name} {at}", getattr(point, name)) for name in latencies]


def same_target(report: AcceptanceReport, expected: TargetFingerprint) -> RuleResult:
    """The report is about the target the decision is wanted for."""
    ours = report.target.fingerprint.model_dump()
    theirs = expected.model_dump()
    different = [part for part in ours if ours[part] != theirs[part]]
    return RuleResult(
        rule="target fingerprint",
        verdict=Verdict.FAIL if different else Verdict.PASS,
        value=len(different),
        threshold=0,
        detail=f"measured on another target: {', '.join(different)} differ"
        if different
        else "measured on this target",
    )


def min_acceptance(
    arm: ArmReport, threshold: float, settings: GateSettings, *, name: str
) -> RuleResult:
    """The acceptance length over all slices, recomputed from the prompts, is shown to reach the
    threshold.

    A drafter of which next to nothing was accepted has no interval worth the name: one prompt with
    a lucky draft is all its variance. So futility is a fail by itself: less than a tenth of the
    drafts per step that are asked for.
    """
    num, den = acceptance_sums(arm.prompts)
    strata = slices_of(arm.prompts)
    estimate = estimate_ratio(num, den, origin=1.0, strata=strata)
    verdict = threshold_verdict(estimate, threshold, alpha=settings.alpha)
    verdict, note = pass_if_enough(verdict, estimate, len(arm.prompts), settings)
    is_short = num_counted(estimate, len(arm.prompts)) < settings.min_prompts_per_slice
    is_futile = (
        estimate is not None
        and estimate.value - 1 < FUTILE_SHARE * (threshold - 1)
        and not is_short
    )

    note = (
        "no target step had a draft"
        if not den.sum()
        else "next to nothing was accepted"
        if is_futile
        else note
    )

    bootstrap = bootstrap_ratio(
        num,
        den,
        num_samples=settings.bootstrap_samples,
        seed=settings.seed,
        confidence=1 - 2 * settings.alpha,
        strata=strata,
    )

    return estimated_rule(
        name,
        estimate,
        # No step with a draft: there is a drafter and it did nothing, which is a failure, not a
        # lack of data.
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
    """tok/s over no draft at the serving load; None without a limit in the recipe.

    The geometric mean of the interleaved rounds' ratios and its interval (`rounds.py`): pass or
    fail where it is shown to lie at or above the limit or below it, at one-sided level `alpha`. A
    measurement without rounds, or with a single one, shows no spread and is never more than
    inconclusive.
    """
    if settings.min_speedup is None:
        return None
    level, limit = settings.serving_requests_in_flight, settings.min_speedup
    arms = {arm: one.speed for arm, one in report.arms.items()}
    ours, theirs = (_rounds(arms.get(arm, ()), level) for arm in (Arm.CANDIDATE, Arm.NO_DRAFT))
    estimate = estimate_speedup(ours, theirs)
    confidence = 1 - 2 * settings.alpha

    further = None
    interval = estimate.interval(confidence) if estimate else None
    verdict = threshold_verdict(estimate, limit, alpha=settings.alpha)
    if verdict is Verdict.INCONCLUSIVE:
        needed = rounds_needed(ours, theirs, limit, alpha=next_level(settings.alpha, settings))
        further = max(needed - len(ours), 1) if needed is not None else None

    return RuleResult(
        rule=f"speed-up at {level} in flight",
        verdict=verdict,
        value=estimate.value if estimate else speedups(arms).get(level),
        threshold=limit,
        detail=_speed_words(ours, theirs, further, interval=interval, confidence=confidence),
        interval=interval,
        confidence=confidence if estimate else None,
        p_values={"fast enough": estimate.p_above(limit), "too slow": estimate.p_below(limit)}
        if estimate
        else {},
        num_further_rounds=further,
    )


def _rounds(points: Sequence[SpeedPoint], level: int) -> tuple[float, ...]:
    return next(
        (point.round_tokens_per_s for point in points if point.requests_in_flight == level), ()
    )


def _speed_words(
    ours: Sequence[float],
    theirs: Sequence[float],
    further: int | None,
    *,
    interval: tuple[float, float] | None,
    confidence: float,
) -> str:
    words = ["tok/s over no draft"]
    if interval is not None:
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        words.append(f"{100 * confidence:.3g} % interval {interval[0]:.2f}x to {interval[1]:.2f}x")
        words.append(f"{len(ours)} rounds from {min(ratios):.2f}x to {max(ratios):.2f}x")
    elif len(ours) == len(theirs) == 1:
        words.append("one round shows no spread")
    else:
        words.append(
            f"not measured in the same rounds: {len(ours)} of candidate, {len(theirs)} of no_draft"
        )

    if further is not None:
        least = "at least" if interval is None else "about"
        words.append(f"{least} {further:,} more round{'s' if further > 1 else ''} would decide it")
    return "; ".join(words)


def train_served(gap: TrainServedGap | None, settings: GateSettings) -> RuleResult | None:
    """Teacher-forced, reference and served acceptance agree on the same prompts; None without a
    limit in the recipe.
    """
    if settings.max_train_served_gap is None:
        return None
    value = None
    verdict = Verdict.INCONCLUSIVE
    detail = "not measured"

    if gap is not None:
        value = gap.gap
        verdict = Verdict.PASS if value <= settings.max_train_served_gap else Verdict.FAIL
        detail = (
            f"teacher-forced {gap.teacher_forced:.3f}, reference {gap.reference:.3f}, "
            f"served {gap.served:.3f}"
        )
        detail += f" over {gap.num_prompts} prompts"
        if gap.diverging_position is not None:
            detail += f"; they differ most at draft position {gap.diverging_position}"

    return RuleResult(
        rule="train-served gap",
        verdict=verdict,
        value=value,
        threshold=settings.max_train_served_gap,
        detail=detail,
    )


def memory(report: AcceptanceReport, settings: GateSettings) -> RuleResult | None:
    """Peak memory of the candidate's engine over no draft's; None without a limit in the recipe."""
    if settings.max_memory_growth is None:
        return None
    arms = [report.arms.get(arm) for arm in (Arm.CANDIDATE, Arm.NO_DRAFT)]
    ours, plain = (arm.peak_memory_bytes if arm is not None else None for arm in arms)
    value = None
    verdict = Verdict.INCONCLUSIVE
    detail = "not measured for both arms"

    if ours and plain:
        value = ours / plain - 1
        verdict = Verdict.PASS if value <= settings.max_memory_growth else Verdict.FAIL
        detail = f"peak {ours / 2**30:.2f} GiB against {plain / 2**30:.2f} GiB without a drafter"

    return RuleResult(
        rule="memory",
        verdict=verdict,
        value=value,
        threshold=settings.max_memory_growth,
        detail=detail,
    )
