"""Forest plot of a gate decision: paired differences to the champion with their intervals and the
margin.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from components.contracts import Arm, GateDecision, RuleResult, Verdict
from components.reporting.style import ARM_COLOURS, BAD, GOOD, GRID, INK, new_figure

SLICE_RULE, OVERALL_RULE = "non-inferior on ", "superior overall"
VERDICT_COLOURS = {
    Verdict.PASS: GOOD,
    Verdict.FAIL: BAD,
    Verdict.INCONCLUSIVE: ARM_COLOURS[Arm.UNTRAINED],
}


def paired_differences(decision: GateDecision) -> Figure | None:
    """A row per slice and one for all of them; None when no champion was measured.

    Thick: the interval the verdict rests on. Thin, below it: the BCa bootstrap interval of the same
    level.
    """
    rules = [
        rule
        for rule in decision.rules
        if rule.rule.startswith(SLICE_RULE) or rule.rule == OVERALL_RULE
    ]
    rules = [rule for rule in rules if rule.value is not None and rule.interval is not None]
    if not rules:
        return None

    figure, axes = new_figure(
        "Candidate against champion, same prompts",
        subtitle=_subtitle(rules),
        size=(8.0, 1.9 + 0.55 * len(rules)),
    )
    for row, rule in enumerate(rules):
        _row(axes, row, rule)

    margins = {
        rule.threshold
        for rule in rules
        if rule.rule.startswith(SLICE_RULE) and rule.threshold is not None
    }
    _reference_lines(axes, margins)
    axes.set_yticks(range(len(rules)), [_name(rule) for rule in rules])
    axes.set_ylim(len(rules) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)

    axes.grid(axis="x", color=GRID, linewidth=0.8)
    _x_axis(axes, rules, margins)
    return figure


def _row(axes: Any, row: int, rule: RuleResult) -> None:
    assert rule.value is not None and rule.interval is not None
    colour = VERDICT_COLOURS[rule.verdict]
    axes.plot(
        [100 * end for end in rule.interval],
        [row, row],
        color=colour,
        linewidth=2.6,
        solid_capstyle="butt",
    )

    if rule.bootstrap_interval is not None:
        ends = [100 * end for end in rule.bootstrap_interval]
        axes.plot(ends, [row + 0.22] * 2, color=colour, linewidth=1, alpha=0.6)

    marker = "D" if rule.rule == OVERALL_RULE else "o"
    axes.plot([100 * rule.value], [row], marker=marker, markersize=7, color=colour)
    axes.annotate(
        f"{100 * rule.value:+.1f} %  "
        f"{rule.verdict if rule.binding or rule.verdict is Verdict.PASS else 'not shown'}",
        (1.01, row),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=9,
        color=INK,
    )


def _reference_lines(axes: Any, margins: set[float]) -> None:
    axes.axvline(0, color=INK, linewidth=1)
    for margin in margins:
        axes.axvline(100 * margin, color=BAD, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(
            f"margin {100 * margin:g} %",
            (100 * margin, 0.0),
            xycoords=("data", "axes fraction"),
            xytext=(-4, 4),
            textcoords="offset points",
            fontsize=8.5,
            color=BAD,
            ha="right",
            va="bottom",
        )


def _x_axis(axes: Any, rules: list[RuleResult], margins: set[float]) -> None:
    ends = [
        100 * end
        for rule in rules
        for end in (*(rule.interval or ()), *(rule.bootstrap_interval or ()))
    ]
    ends += [0.0, *(100 * margin for margin in margins)]
    space = 0.06 * (max(ends) - min(ends) or 1.0)

    # The margin's name stands left of its line.
    axes.set_xlim(min(ends) - 2.5 * space, max(ends) + space)
    axes.set_xlabel(
        "difference in acceptance length, % of the champion's (right: candidate better)"
    )
    axes.tick_params(axis="y", length=0)


def _name(rule: RuleResult) -> str:
    name = "all slices" if rule.rule == OVERALL_RULE else rule.rule.removeprefix(SLICE_RULE)
    return f"{name}\n{rule.num_prompts} prompts"


def _subtitle(rules: list[RuleResult]) -> str:
    levels = sorted({f"{100 * rule.confidence:.3g} %" for rule in rules if rule.confidence})
    return f"{' and '.join(levels)} intervals that the verdicts rest on; thin: BCa bootstrap"
