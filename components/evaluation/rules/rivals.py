"""Rivals that draft without a drafter (n-gram, suffix): measured beside the candidate and compared
with it.

Lengths are over all target steps, those without a draft included (`all_steps.py`). A rival gets the
side of their bounds that speaks for it in each claim: its fewest steps where the candidate is to be
better, its most where the candidate is to be worse. What is not known can hide a difference; it
cannot make one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from components.contracts import (
    AcceptanceReport,
    Arm,
    ArmEndpoint,
    ArmReport,
    PromptMeasurement,
    Rival,
    RivalComparison,
    RivalReport,
    RuleResult,
    SpeedPoint,
    Standing,
    Verdict,
)
from components.errors import EvaluationError
from components.evaluation.acceptance import Measured
from components.evaluation.prompts import Prompt
from components.evaluation.report import arm_report
from components.evaluation.rules.estimated import members_of, paired_prompts, slices_of
from components.evaluation.statistics.all_steps import all_step_length, all_step_sums
from components.evaluation.statistics.estimate import Estimate
from components.evaluation.statistics.ratios import estimate_relative_difference, holm
from components.settings import EvaluationSettings, GateSettings

MeasureArm = Callable[[ArmEndpoint, Sequence[Prompt]], Measured]
MeasureSpeed = Callable[
    [Sequence[ArmEndpoint], Sequence[Prompt]], Mapping[str, tuple[SpeedPoint, ...]]
]
Pair = tuple[list[PromptMeasurement], list[PromptMeasurement]]


@dataclass(frozen=True)
class MeasuredRival:
    """One rival over the prompts, its speed, and what no draft did in turns with it."""

    rival: Rival
    measured: Measured
    speed: tuple[SpeedPoint, ...]
    no_draft_speed: tuple[SpeedPoint, ...]


def rivals_of(settings: EvaluationSettings) -> tuple[Rival, ...]:
    """The rivals that the recipe asks for, as they are served."""
    return tuple(
        Rival(
            method=method,
            num_draft_tokens=settings.rival_draft_tokens,
            lookup=settings.ngram_lookup,
        )
        for method in settings.rivals
    )


def measure_rival(
    endpoint: ArmEndpoint,
    plain: ArmEndpoint,
    prompts: Sequence[Prompt],
    *,
    measure: MeasureArm,
    speed: MeasureSpeed,
) -> MeasuredRival:
    """One rival's acceptance over all prompts, and its speed in turns with no draft.

    Args:
        endpoint: the rival's engine (`Engine.endpoint` of a spec with a `rival`).
        plain: the engine without any draft.
        prompts: those of the candidate.
        measure: how an arm's acceptance is measured, e.g. `measure_acceptance` with its settings.
        speed: how speed is, e.g. `measure_speed` with its settings.

    Raises:
        EvaluationError: the endpoint serves no rival; as `measure` and `speed`.
    """
    if endpoint.rival is None:
        raise EvaluationError(f"arm '{endpoint.arm}' serves no rival", got=endpoint.url)
    arm = endpoint.model_copy(update={"arm": endpoint.rival.method})
    measured = measure(arm, prompts)
    points = speed([arm, plain], prompts)
    return MeasuredRival(endpoint.rival, measured, points[arm.arm], points[plain.arm])


def with_rivals(report: AcceptanceReport, rivals: Sequence[MeasuredRival]) -> AcceptanceReport:
    """`report` with its rivals, over the prompts that its candidate answered.

    Raises:
        EvaluationError: a rival ran on another engine version, did not answer one of those prompts,
            or is there twice.
    """
    if len({one.rival.method for one in rivals}) != len(rivals):
        raise EvaluationError(
            "a rival was measured twice", got=", ".join(r.rival.method for r in rivals)
        )
    return report.model_copy(update={"rivals": tuple(_rival_report(report, one) for one in rivals)})


def _rival_report(report: AcceptanceReport, one: MeasuredRival) -> RivalReport:
    """The rival over the candidate's prompts, each once: a mean over other prompts is no
    comparison.
    """
    measured = one.measured
    method = one.rival.method
    if measured.engine_version != report.engine_version:
        raise EvaluationError(
            f"rival {method} ran on another engine version",
            got=measured.engine_version,
            expected=report.engine_version,
        )

    asked = {prompt.prompt_id for prompt in report.arms[Arm.CANDIDATE].prompts}
    kept = tuple(prompt for prompt in measured.prompts if prompt.prompt_id in asked)
    if len(kept) != len(asked):
        missing = sorted(asked - {prompt.prompt_id for prompt in kept})
        raise EvaluationError(
            f"rival {method} did not answer the candidate's prompts, each once",
            got=f"{len(kept)} answers, without {', '.join(missing[:3]) or 'none'}",
            expected=f"{len(asked)} prompts",
            fix="Start both engines with the same limits.",
        )

    arm = arm_report(
        method,
        prompts=kept,
        speed=one.speed,
        checkpoint_digest=None,
        num_draft_tokens=one.rival.num_draft_tokens,
        engine_counters=measured.counters,
    )

    return RivalReport(rival=one.rival, arm=arm, no_draft_speed=one.no_draft_speed)


def beaten_by(report: AcceptanceReport, settings: GateSettings) -> tuple[RivalComparison, ...]:
    """How the candidate stands to every rival: over all slices first, then on each slice by name.

    A drafter that does not beat a rival that costs nothing has not shown what it is for. Claims
    about slices are choices among them, so their levels are Holm's; the claim over all slices is
    one. A slice with too few prompts is neither better nor worse.

    Raises:
        EvaluationError: a rival did not answer the candidate's prompts.
    """
    return tuple(
        comparison
        for rival in report.rivals
        for comparison in _against(report.arms[Arm.CANDIDATE], rival, settings)
    )


def _against(
    candidate: ArmReport, rival: RivalReport, settings: GateSettings
) -> list[RivalComparison]:
    whole = paired_prompts(candidate, rival.arm)
    names = sorted(set(slices_of(whole[0])))
    pairs = {name: (members_of(whole[0], name), members_of(whole[1], name)) for name in names}
    found = {
        name: (_difference(pair), _difference(pair, at_most=True)) for name, pair in pairs.items()
    }
    better = holm(
        {name: p for name, (one, _) in found.items() if (p := _p_better(one)) is not None}
    )

    worse = holm({name: p for name, (_, one) in found.items() if (p := _p_worse(one)) is not None})
    overall = _difference(whole)
    overall_low = _difference(whole, at_most=True)
    rows = [
        _comparison(
            rival, None, whole, overall, _p_better(overall), _p_worse(overall_low), settings
        )
    ]

    return rows + [
        _comparison(rival, name, pair, found[name][0], better.get(name), worse.get(name), settings)
        for name, pair in pairs.items()
    ]


def _comparison(
    rival: RivalReport,
    slice_name: str | None,
    pair: Pair,
    estimate: Estimate | None,
    p_better: float | None,
    p_worse: float | None,
    settings: GateSettings,
) -> RivalComparison:
    standing = Standing.NOT_SHOWN
    if len(pair[0]) >= settings.min_prompts_per_slice:
        if p_better is not None and p_better <= settings.alpha:
            standing = Standing.BETTER
        elif p_worse is not None and p_worse <= settings.alpha:
            standing = Standing.WORSE

    confidence = 1 - 2 * settings.alpha
    interval = estimate.interval(confidence) if estimate is not None else None
    is_finite = interval is not None and all(map(math.isfinite, interval))
    return RivalComparison(
        method=rival.rival.method,
        slice=slice_name,
        candidate_length=all_step_length(pair[0]),
        rival_length=all_step_length(pair[1]),
        rival_length_low=all_step_length(pair[1], at_most=True),
        difference=estimate.value if estimate is not None else None,
        interval=interval if is_finite else None,
        confidence=confidence,
        p_better=p_better,
        p_worse=p_worse,
        standing=standing,
        num_prompts=len(pair[0]),
    )


def _difference(pair: Pair, *, at_most: bool = False) -> Estimate | None:
    """Candidate's length over the rival's, less 1; with `at_most`, the rival at its most steps."""
    sums = (*all_step_sums(pair[0]), *all_step_sums(pair[1], at_most=at_most))
    estimate = estimate_relative_difference(*sums, strata=slices_of(pair[0]))
    return estimate if estimate is not None and math.isfinite(estimate.standard_error) else None


def _p_better(estimate: Estimate | None) -> float | None:
    # Equal is not better, nor worse: with no spread at all a tie would count as above.
    if estimate is None or (estimate.standard_error == 0 and estimate.value == 0):
        return None
    return estimate.p_above(0.0)


def _p_worse(estimate: Estimate | None) -> float | None:
    if estimate is None or (estimate.standard_error == 0 and estimate.value == 0):
        return None
    return estimate.p_below(0.0)


def rival_rules(comparisons: Sequence[RivalComparison]) -> list[RuleResult]:
    """One rule per rival, for information: pass where the candidate is better over all slices, fail
    where worse.
    """
    words = {
        Standing.BETTER: Verdict.PASS,
        Standing.WORSE: Verdict.FAIL,
        Standing.NOT_SHOWN: Verdict.INCONCLUSIVE,
    }
    rules = []

    for overall in (one for one in comparisons if one.slice is None):
        slices = [one for one in comparisons if one.method == overall.method and one.slice]
        detail = (
            f"{overall.candidate_length:.3f} against {overall.rival_length:.3f} tokens per "
            "target step"
        )
        for standing in Standing:
            named = [str(one.slice) for one in slices if one.standing is standing]
            detail += f"; {standing} on {', '.join(named)}" if named else ""
        p_values = {"better": overall.p_better, "worse": overall.p_worse}
        rules.append(
            RuleResult(
                rule=f"better than {overall.method}",
                verdict=words[overall.standing],
                value=overall.difference,
                threshold=0.0,
                detail=detail,
                interval=overall.interval,
                confidence=overall.confidence if overall.interval else None,
                p_values={claim: p for claim, p in p_values.items() if p is not None},
                binding=False,
                num_prompts=overall.num_prompts,
            )
        )

    return rules
