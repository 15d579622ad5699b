"""No draft position has collapsed: the rule on acceptance by position. Pure."""

from __future__ import annotations

import math

from components.contracts import ArmReport, RuleResult, Verdict
from components.evaluation.rules.estimated import (
    estimated_rule,
    in_order,
    paired_prompts,
    position_sums,
    slices_of,
)
from components.evaluation.statistics.ratios import (
    Estimate,
    estimate_ratio,
    estimate_relative_difference,
    holm,
    ratio_of_sums,
    threshold_verdict,
)
from components.settings import GateSettings


def position_collapse(
    candidate: ArmReport, champion: ArmReport | None, settings: GateSettings
) -> RuleResult:
    """At every draft position enough of the drafts that got so far are accepted.

    The share at position k is accepted(k) / accepted(k - 1), the first one's accepted(1) / steps.
    The first position must be shown to reach the floor. Later ones hold few drafts, so there a
    collapse must be shown (Holm over the positions): a share below the floor, or more than
    `max_position_loss` below the champion's on the same prompts. Value and interval are the first
    position's; `detail` holds the others' shares and what collapsed.

    Raises:
        EvaluationError: candidate and champion did not answer the same prompts.
    """
    prompts = in_order(candidate)
    floor = settings.min_position_acceptance
    positions = range(1, len(candidate.acceptance_by_position) + 1)
    shares = {k: ratio_of_sums(*position_sums(prompts, k)) for k in positions}
    collapsed = _below_floor(candidate, floor, settings.alpha)
    collapsed |= _below_champion(candidate, champion, settings) if champion is not None else {}
    first = _first(candidate)

    verdict = threshold_verdict(first, floor, alpha=settings.alpha)
    if collapsed or not sum(prompt.num_steps for prompt in prompts):
        verdict = Verdict.FAIL

    told = ", ".join(f"{share:.2f}" for share in shares.values() if math.isfinite(share))
    return estimated_rule(
        "position collapse",
        first,
        verdict,
        threshold=floor,
        alpha=settings.alpha,
        num_prompts=len(prompts),
        settings=settings,
        p_values={"first position reaches the floor": first.p_above(floor)}
        if first is not None
        else {},
        note="; ".join(
            [
                "first position; accepted of those before, by position: "
                f"{told or 'nothing drafted'}",
                *collapsed.values(),
            ]
        ),
    )


def _first(candidate: ArmReport) -> Estimate | None:
    prompts = in_order(candidate)
    if not candidate.acceptance_by_position:
        return None
    return estimate_ratio(*position_sums(prompts, 1), origin=0.0, strata=slices_of(prompts))


def _below_floor(candidate: ArmReport, floor: float, alpha: float) -> dict[int, str]:
    prompts = in_order(candidate)
    p_values = {}
    for k in range(1, len(candidate.acceptance_by_position) + 1):
        estimate = estimate_ratio(*position_sums(prompts, k), origin=0.0, strata=slices_of(prompts))
        if estimate is not None:
            p_values[str(k)] = estimate.p_below(floor)
    return {
        int(k): f"position {k} is below the floor (Holm p {p:.2g})"
        for k, p in holm(p_values).items()
        if p <= alpha
    }


def _below_champion(
    candidate: ArmReport, champion: ArmReport, settings: GateSettings
) -> dict[int, str]:
    ours, theirs = paired_prompts(candidate, champion)
    num_positions = min(len(candidate.acceptance_by_position), len(champion.acceptance_by_position))
    p_values = {}
    for k in range(1, num_positions + 1):
        estimate = estimate_relative_difference(
            *position_sums(ours, k), *position_sums(theirs, k), origin=0.0, strata=slices_of(ours)
        )
        if estimate is not None:
            p_values[str(k)] = estimate.p_below(-settings.max_position_loss)

    return {
        int(
            k
        ): f"position {k} is over {settings.max_position_loss:.0%} below the champion's (Holm p "
        f"{p:.2g})"
        for k, p in holm(p_values).items()
        if p <= settings.alpha
    }
