"""Plots of one `AcceptanceReport`: acceptance by slice, position and step, tok/s against requests
in flight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from components.contracts import AcceptanceReport, Arm, ArmReport, GateDecision
from components.reporting.gate.forest_plot import paired_differences
from components.reporting.report import speedup
from components.reporting.style import BAD, INK, colour, label, new_figure, save

ARM_ORDER: tuple[str, ...] = (
    Arm.CANDIDATE,
    Arm.CHAMPION,
    Arm.UNTRAINED,
    Arm.NO_DRAFT,
    Arm.SCHEDULED,
    Arm.NO_DRAFT_BESIDE,
)


def plot_acceptance(
    report: AcceptanceReport, directory: Path, *, decision: GateDecision | None = None
) -> dict[str, Path]:
    """Draw every plot that the report has figures for. Returns PNG paths by plot name."""
    figures = acceptance_figures(report, decision=decision)
    return {name: save(figure, Path(directory) / f"{name}.png") for name, figure in figures.items()}


def acceptance_figures(
    report: AcceptanceReport, *, decision: GateDecision | None = None
) -> dict[str, Figure]:
    """Every figure that report and decision have numbers for, by plot name, in reading order."""
    out_above = decision.drafter_out_above if decision is not None else None
    drawn = {
        "acceptance_by_slice": acceptance_by_slice(report),
        "paired_differences": paired_differences(decision) if decision is not None else None,
        "acceptance_by_position": acceptance_by_position(report),
        "accepted_per_step": accepted_per_step(report),
        "speed_by_requests_in_flight": speed_by_requests_in_flight(report, out_above=out_above),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def ordered_arms(report: AcceptanceReport) -> list[ArmReport]:
    """Arms in the order people read them: candidate, champion, untrained, no draft, others."""
    rank: dict[str, int] = {arm: index for index, arm in enumerate(ARM_ORDER)}
    return [
        report.arms[arm]
        for arm in sorted(report.arms, key=lambda arm: (rank.get(arm, len(rank)), arm))
    ]


def acceptance_by_slice(report: AcceptanceReport) -> Figure | None:
    """Bars per slice and arm with 95 % intervals; None when no arm drafts."""
    arms = [arm for arm in ordered_arms(report) if arm.acceptance_by_position]
    if not arms:
        return None

    slices = sorted({name for arm in arms for name in arm.acceptance_by_slice})
    names = [*slices, "all"]
    figure, axes = new_figure(
        "Acceptance length by slice",
        subtitle=f"{report.target.name}, served at temperature {report.temperature:g}; tokens "
        "per target step;"
        " 95 % intervals over prompts",
    )

    width = 0.8 / len(arms)
    for index, arm in enumerate(arms):
        offsets = [
            position + (index - (len(arms) - 1) / 2) * width for position in range(len(names))
        ]
        values = [arm.acceptance_by_slice.get(name, math.nan) for name in slices] + [
            arm.acceptance_length
        ]
        intervals = [arm.interval_by_slice.get(name) for name in slices] + [arm.acceptance_interval]
        gains = [value - 1.0 for value in values]
        axes.bar(
            offsets,
            gains,
            bottom=1.0,
            width=width * 0.92,
            color=colour(arm.arm),
            label=label(arm.arm),
        )
        _intervals(axes, offsets, values, intervals)
        for offset, value, interval in zip(offsets, values, intervals, strict=True):
            if math.isfinite(value):
                top = interval[1] if interval else value
                axes.annotate(
                    f"{value:.2f}",
                    (offset, top),
                    xytext=(0, 3),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                )

    counts = {name: sum(prompt.slice == name for prompt in arms[0].prompts) for name in slices}
    ticks = [f"{name}\n{counts[name]} prompts" for name in slices] + [
        f"all\n{len(arms[0].prompts)} prompts"
    ]
    axes.set_xticks(range(len(names)), ticks)
    axes.set_ylabel("acceptance length (1.0 = no draft)")
    axes.set_ylim(1.0, max(1.1, axes.get_ylim()[1] * 1.06))
    axes.legend(frameon=False, fontsize=9, loc="upper right", ncols=len(arms))

    return figure


def acceptance_by_position(report: AcceptanceReport) -> Figure | None:
    """Share of target steps that accepted the draft token at position 1..K; None when no arm
    drafts.
    """
    arms = [arm for arm in ordered_arms(report) if arm.acceptance_by_position]
    if not arms:
        return None

    figure, axes = new_figure(
        "Acceptance by draft position",
        subtitle="share of target steps that accepted the draft token at this position (and all "
        "before it)",
    )

    for arm in arms:
        positions = range(1, len(arm.acceptance_by_position) + 1)
        axes.plot(
            positions, arm.acceptance_by_position, marker="o", linewidth=2.2, color=colour(arm.arm),
            label=f"{label(arm.arm)} (acceptance length {arm.acceptance_length:.2f})",
        )  # fmt: skip
        if arm.arm == arms[0].arm:
            _value_labels(axes, list(positions), list(arm.acceptance_by_position), "{:.2f}")

    axes.set_xticks(range(1, max(len(arm.acceptance_by_position) for arm in arms) + 1))
    axes.set_xlabel("draft position")
    axes.set_ylabel("share of steps")
    axes.set_ylim(0, max(0.05, *(max(arm.acceptance_by_position) for arm in arms)) * 1.2)
    axes.legend(frameon=False, fontsize=9, loc="upper right")

    return figure


def accepted_per_step(report: AcceptanceReport) -> Figure | None:
    """A bar per arm: which share of target steps accepted 0, 1, ... K draft tokens; None without
    histograms.
    """
    arms = [arm for arm in ordered_arms(report) if sum(arm.acceptance_histogram)]
    if not arms:
        return None

    figure, axes = new_figure(
        "Draft tokens accepted per target step",
        subtitle="share of steps by tokens accepted",
        size=(8.0, 1.5 + 0.6 * len(arms)),
    )

    for row, arm in enumerate(arms):
        total = sum(arm.acceptance_histogram)
        start = 0.0
        for accepted, count in enumerate(arm.acceptance_histogram):
            share = count / total
            strength = 0.18 + 0.82 * accepted / max(1, len(arm.acceptance_histogram) - 1)
            axes.barh(
                row,
                share,
                left=start,
                height=0.62,
                color=colour(arm.arm),
                alpha=strength,
                linewidth=0,
            )
            if share >= 0.04:
                ink = "white" if strength > 0.55 else INK
                place = (start + share / 2, row)
                axes.annotate(
                    f"{accepted}: {share:.0%}",
                    place,
                    ha="center",
                    va="center",
                    fontsize=8,
                    color=ink,
                )
            start += share

    axes.set_yticks(range(len(arms)), [label(arm.arm) for arm in arms])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlabel("share of target steps")
    axes.grid(axis="y", visible=False)

    return figure


def speed_by_requests_in_flight(
    report: AcceptanceReport, *, out_above: int | None = None
) -> Figure | None:
    """tok/s against requests in flight, a line per arm, the break-even with no draft marked; None
    without speed.
    """
    arms = [arm for arm in ordered_arms(report) if arm.speed]
    if not arms:
        return None

    ratios = speedup(report)
    figure, axes = new_figure(
        "Throughput against requests in flight", subtitle=_speed_subtitle(ratios)
    )

    for arm in arms:
        levels = [point.requests_in_flight for point in arm.speed]
        rates = [point.output_tokens_per_s for point in arm.speed]
        axes.plot(
            levels, rates, marker="o", linewidth=2.2, color=colour(arm.arm), label=label(arm.arm)
        )

    _speed_labels(axes, arms)
    levels = sorted({point.requests_in_flight for arm in arms for point in arm.speed})
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [str(level) for level in levels])
    axes.minorticks_off()
    axes.set_xlim(levels[0] / 1.25, levels[-1] * 1.25)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("output tokens per second")

    _mark_loads(axes, break_even(ratios), out_above, levels)
    axes.legend(
        frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=len(arms)
    )
    return figure


def _mark_loads(
    axes: Any, even: float | None, out_above: int | None, levels: Sequence[int]
) -> None:
    """The break-even with no draft as a line, and the loads at which the drafter should be out as a
    shade.
    """
    if even is not None:
        axes.axvline(even, color=BAD, linewidth=1.2, linestyle=(0, (4, 3)))
        is_right = math.log2(even) > (math.log2(levels[0]) + math.log2(levels[-1])) / 2
        axes.annotate(
            f"break-even ~ {even:.1f}", (even, 0.03), xycoords=("data", "axes fraction"),
            xytext=(-5 if is_right else 5, 0), textcoords="offset points", fontsize=9, color=BAD,
            ha="right" if is_right else "left",
        )  # fmt: skip

    if out_above and out_above < levels[-1]:
        axes.axvspan(out_above, levels[-1] * 1.25, color=BAD, alpha=0.06, linewidth=0)
        axes.annotate(
            f"drafter out above {out_above}",
            (out_above, 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(6, 0),
            textcoords="offset points",
            fontsize=9,
            color=BAD,
            va="top",
        )


def break_even(ratios: dict[int, float]) -> float | None:
    """Requests in flight at which the speed-up first falls to 1, linear in log2 between measured
    points.

    None when it never falls to 1 in the measured range, or is below 1 from the start.
    """
    points = sorted(ratios.items())
    for (low, before), (high, after) in pairwise(points):
        if before >= 1.0 > after:
            share = (before - 1.0) / (before - after)
            return float(2 ** (math.log2(low) + share * (math.log2(high) - math.log2(low))))
    return None


def _speed_subtitle(ratios: dict[int, float]) -> str:
    if not ratios:
        return "medians over interleaved rounds"
    told = ", ".join(f"{ratio:.2f}x at {level}" for level, ratio in sorted(ratios.items()))
    return f"medians over interleaved rounds; candidate over no draft: {told}"


def _intervals(
    axes: Any,
    offsets: Sequence[float],
    values: Sequence[float],
    intervals: Sequence[tuple[float, float] | None],
) -> None:
    known = [
        (x, value, ends)
        for x, value, ends in zip(offsets, values, intervals, strict=True)
        if ends is not None
    ]
    if known:
        lows = [max(0.0, value - ends[0]) for _, value, ends in known]
        highs = [max(0.0, ends[1] - value) for _, value, ends in known]
        axes.errorbar(
            [x for x, _, _ in known], [value for _, value, _ in known], yerr=[lows, highs],
            fmt="none", ecolor=INK, elinewidth=1.1, capsize=3,
        )  # fmt: skip


def _value_labels(axes: Any, xs: Sequence[float], ys: Sequence[float], pattern: str) -> None:
    for x, y in zip(xs, ys, strict=True):
        axes.annotate(
            pattern.format(y),
            (x, y),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=INK,
        )


def _speed_labels(axes: Any, arms: Sequence[ArmReport]) -> None:
    """tok/s beside each point: the fastest arm's above it, the slowest's below, the others' to the
    right.
    """
    by_level: dict[int, list[tuple[float, str]]] = {}
    for arm in arms:
        for point in arm.speed:
            by_level.setdefault(point.requests_in_flight, []).append(
                (point.output_tokens_per_s, arm.arm)
            )

    for level, rates in by_level.items():
        ordered = sorted(rates)
        highest = ordered[-1][0]
        for rank, (rate, arm_name) in enumerate(ordered):
            is_top = rank == len(ordered) - 1
            is_bottom = rank == 0
            nearest = min(
                (abs(rate - other) for other, name in rates if name != arm_name), default=highest
            )
            if not (is_top or is_bottom) and nearest < 0.06 * max(highest, 1.0):
                continue  # it would lie on its neighbour's; the table has it
            offset = (0, 7) if is_top else (0, -14) if is_bottom else (8, -3)
            axes.annotate(
                f"{rate:.0f}",
                (level, rate),
                xytext=offset,
                textcoords="offset points",
                ha="center" if is_top or is_bottom else "left",
                fontsize=8,
                color=colour(arm_name),
                fontweight="bold",
            )
