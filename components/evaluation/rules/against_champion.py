"""Rules that set the candidate against the champion over the same prompts. Pure."""

from __future__ import annotations

import math

from components.contracts import ArmReport, PromptMeasurement, RuleResult, Verdict
from components.evaluation.rules.estimated import (
    acceptance_sums,
    estimated_rule,
    members_of,
    paired_prompts,
    pass_if_enough,
    slices_of,
)
from components.evaluation.statistics.bootstrap import bootstrap_relative_difference
from components.evaluation.statistics.estimate import Estimate, threshold_verdict
from components.evaluation.statistics.ratios import (
    estimate_relative_difference,
    holm,
    non_inferiority_verdicts,
)
from components.settings import GateSettings

SUPERIOR = "superior overall"

Pair = tuple[list[PromptMeasurement], list[PromptMeasurement]]


def non_inferiority(
    candidate: ArmReport, champion: ArmReport, settings: GateSettings
) -> list[RuleResult]:
    """One rule per slice: candidate's acceptance length is at most the margin below the champion's,
    same prompts.

    Raises:
        EvaluationError: the arms did not answer the same prompts.
    """
    ours, theirs = paired_prompts(candidate, champion)
    pairs = {
        name: (members_of(ours, name), members_of(theirs, name))
        for name in sorted(set(slices_of(ours)))
    }
    estimates = {name: _difference(pair) for name, pair in pairs.items()}
    verdicts = non_inferiority_verdicts(
        estimates,
        settings.non_inferiority_margin,
        alpha_pass=settings.non_inferiority_alpha,
        alpha_fail=settings.alpha,
    )

    known = {name: one for name, one in estimates.items() if one is not None}
    worse = holm(
        {name: one.p_below(-settings.non_inferiority_margin) for name, one in known.items()}
    )
    better = holm({name: one.p_above(0.0) for name, one in known.items()})
    rules = []

    for name, pair in pairs.items():
        p_values = {}
        if name in known:
            p_values = {
                "non-inferior": known[name].p_above(-settings.non_inferiority_margin),
                "worse by the margin (Holm)": worse[name],
                "better (Holm)": better[name],
            }
        rules.append(_slice_rule(name, pair, estimates[name], verdicts[name], p_values, settings))

    return rules


def _slice_rule(
    name: str,
    pair: Pair,
    estimate: Estimate | None,
    verdict: Verdict,
    p_values: dict[str, float],
    settings: GateSettings,
) -> RuleResult:
    num_prompts = len(pair[0])
    verdict, note = pass_if_enough(verdict, estimate, num_prompts, settings)
    if p_values.get("better (Holm)", 1.0) <= settings.alpha:
        note = "; ".join(word for word in (note, "better than the champion here") if word)

    # The interval of the level that the verdict rests on: a fail is one at `alpha`, which Holm only
    # makes harder.
    alpha = settings.alpha if verdict is Verdict.FAIL else settings.non_inferiority_alpha
    return estimated_rule(
        f"non-inferior on {name}",
        estimate,
        verdict,
        threshold=-settings.non_inferiority_margin,
        alpha=alpha,
        num_prompts=num_prompts,
        settings=settings,
        bootstrap=_bootstrap(pair, alpha=alpha, settings=settings),
        p_values=p_values,
        note=note,
    )


def superiority(candidate: ArmReport, champion: ArmReport, settings: GateSettings) -> RuleResult:
    """Candidate's acceptance length over all slices, in the recipe's proportions, is above the
    champion's.

    Told for information unless the recipe requires it.

    Raises:
        EvaluationError: the arms did not answer the same prompts.
    """
    pair = paired_prompts(candidate, champion)
    estimate = _difference(pair)
    verdict, note = pass_if_enough(
        threshold_verdict(estimate, 0.0, alpha=settings.alpha), estimate, len(pair[0]), settings
    )

    return estimated_rule(
        SUPERIOR,
        estimate,
        verdict,
        threshold=0.0,
        alpha=settings.alpha,
        num_prompts=len(pair[0]),
        settings=settings,
        bootstrap=_bootstrap(pair, alpha=settings.alpha, settings=settings),
        p_values={"superior": estimate.p_above(0.0)} if estimate else {},
        binding=settings.require_superiority,
        note="; ".join(
            word for word in (note, "" if settings.require_superiority else "not required") if word
        ),
    )


def non_inferior_when_sampled(
    candidate: ArmReport, champion: ArmReport, *, temperature: float, settings: GateSettings
) -> RuleResult:
    """As `non_inferiority`, over all slices at once: a further temperature is measured on few
    prompts.

    Raises:
        EvaluationError: the arms did not answer the same prompts.
    """
    pair = paired_prompts(candidate, champion)
    estimate = _difference(pair)
    alpha = settings.non_inferiority_alpha
    verdict = threshold_verdict(estimate, -settings.non_inferiority_margin, alpha=alpha)
    verdict, note = pass_if_enough(verdict, estimate, len(pair[0]), settings)

    return estimated_rule(
        f"non-inferior at temperature {temperature:g}",
        estimate,
        verdict,
        threshold=-settings.non_inferiority_margin,
        alpha=alpha,
        num_prompts=len(pair[0]),
        settings=settings,
        bootstrap=_bootstrap(pair, alpha=alpha, settings=settings),
        note=note,
    )


def _difference(pair: Pair) -> Estimate | None:
    sums = (*acceptance_sums(pair[0]), *acceptance_sums(pair[1]))
    estimate = estimate_relative_difference(*sums, strata=slices_of(pair[0]))
    return estimate if estimate is not None and math.isfinite(estimate.standard_error) else None


def _bootstrap(pair: Pair, *, alpha: float, settings: GateSettings) -> tuple[float, float] | None:
    sums = (*acceptance_sums(pair[0]), *acceptance_sums(pair[1]))
    return bootstrap_relative_difference(
        *sums,
        num_samples=settings.bootstrap_samples,
        seed=settings.seed,
        confidence=1 - 2 * alpha,
        strata=slices_of(pair[0]),
    )
