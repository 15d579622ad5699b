"""Plots of the loop as a whole: stage times, training, canary weights, target changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.contracts import Arm, CanaryReport, Slot, StageTiming
from components.reporting.calibration_plots import reliability_diagram
from components.reporting.gate.acceptance_plots import plot_acceptance
from components.reporting.report import (
    ArmFigures,
    LifecycleReport,
    ReportedPoint,
    TargetChangeReport,
)
from components.reporting.style import (
    ARM_COLOURS,
    BAD,
    GOOD,
    INK,
    OTHER_COLOUR,
    new_figure,
    save,
    set_title,
    style_axes,
)


def plot_report(report: LifecycleReport, directory: Path) -> dict[str, Path]:
    """Draw every plot that the report has figures for. Returns PNG paths by plot name, in reading
    order.
    """
    folder = Path(directory)
    plots: dict[str, Path] = {}
    if report.stages:
        plots["stage_times"] = stage_times(
            report.stages,
            folder / "stage_times.png",
            total_s=report.total_s,
            outside_share=report.orchestration_share,
        )

    if report.training_curve:
        plots["training_curve"] = training_curve(
            report.training_curve, folder / "training_curve.png"
        )

    if report.calibration is not None:
        plots["reliability"] = reliability_diagram(report.calibration, folder / "reliability.png")
    if report.acceptance is not None:
        plots |= plot_acceptance(report.acceptance, folder, decision=report.gate)

    if report.canary is not None and report.canary.steps:
        plots["canary_weights"] = canary_weights(report.canary, folder / "canary_weights.png")
    if any(change.old_drafter or change.new_drafter for change in report.target_changes):
        plots["target_changes"] = target_changes(
            report.target_changes, folder / "target_changes.png"
        )

    return plots


def stage_times(
    stages: tuple[StageTiming, ...], path: Path, *, total_s: float, outside_share: float
) -> Path:
    """Bars on the run's own time axis: when each stage ran, and how long."""
    ordered = sorted(stages, key=lambda stage: stage.started_at)
    origin = ordered[0].started_at
    figure, axes = new_figure(
        "Where the time went",
        subtitle=f"{_duration(total_s)} in all, {outside_share:.1%} of it outside the stages",
        size=(8.0, 1.4 + 0.42 * len(ordered)),
    )

    for row, stage in enumerate(ordered):
        start = (stage.started_at - origin).total_seconds() / 60
        width = stage.duration_s / 60
        axes.barh(row, width, left=start, height=0.62, color=OTHER_COLOUR)
        text = _duration(stage.duration_s)
        if stage.num_tokens and stage.duration_s > 0:
            text += f", {stage.num_tokens / stage.duration_s:,.0f} tok/s"
        axes.annotate(
            text,
            (start + width, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )

    axes.set_yticks(range(len(ordered)), [stage.stage for stage in ordered])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#e3e6ea", linewidth=0.8)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.2)
    axes.set_xlabel("minutes since the start")

    return save(figure, path)


def training_curve(curve: tuple[ReportedPoint, ...], path: Path) -> Path:
    """Loss and teacher-forced acceptance length over steps."""
    figure, left = new_figure(
        "Training",
        subtitle="loss (left), teacher-forced acceptance length on validation samples (right)",
    )
    steps = [point.step for point in curve]
    losses = [point.loss for point in curve]

    if len(losses) >= 20:
        left.plot(steps, losses, color="#c9ced6", linewidth=1)
        left.plot(steps, _smoothed(losses), color=OTHER_COLOUR, linewidth=2.2)
    else:
        left.plot(steps, losses, color=OTHER_COLOUR, linewidth=2.2, marker="o", markersize=4)

    left.set_xlabel("optimiser step")
    left.set_ylabel("loss", color=OTHER_COLOUR)
    left.set_ylim(bottom=0)
    measured = [
        (point.step, point.acceptance_length)
        for point in curve
        if point.acceptance_length is not None
    ]

    if measured:
        right = left.twinx()
        right.spines["top"].set_visible(False)
        right.plot(
            *zip(*measured, strict=True),
            color=ARM_COLOURS[Arm.CANDIDATE],
            marker="o",
            linewidth=2.2,
        )
        right.set_ylabel("acceptance length", color=ARM_COLOURS[Arm.CANDIDATE])
        right.tick_params(labelsize=9)
        right.set_ylim(1.0, max(1.05, max(value for _, value in measured)) * 1.05)
        last_step, last = measured[-1]
        right.annotate(
            f"{last:.2f}",
            (last_step, last),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )

    return save(figure, path)


def canary_weights(canary: CanaryReport, path: Path) -> Path:
    """Share of traffic on the candidate over time; each step labelled with its acceptance length
    and requests.
    """
    verdict = (
        "promoted" if canary.promoted else f"rolled back to {(canary.rolled_back_to or 'baseline')}"
    )
    figure, axes = new_figure(
        f"Canary against {canary.baseline.replace('_', ' ')}: {verdict}", subtitle=canary.reason
    )
    origin = canary.steps[0].started_at

    end = 0.0
    for step in canary.steps:
        start = (step.started_at - origin).total_seconds()
        end = start + step.duration_s
        shade = GOOD if step.healthy else BAD
        axes.fill_between(
            [start, end], [step.weight_percent] * 2, color=shade, alpha=0.22, linewidth=0
        )
        axes.plot(
            [start, end],
            [step.weight_percent] * 2,
            color=shade,
            linewidth=2.6,
            solid_capstyle="butt",
        )
        axes.annotate(
            _step_text(
                step.acceptance_length,
                step.num_requests.get(Slot.CANDIDATE, 0),
                step.weight_percent,
            ),
            ((start + end) / 2, step.weight_percent),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=INK,
        )

    if not canary.promoted:
        axes.plot([end, end], [canary.steps[-1].weight_percent, 0], color=BAD, linewidth=2.6)
    axes.set_xlim(0, end * 1.02)
    axes.set_ylim(0, 122)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.set_xlabel("seconds since the canary began")
    axes.set_ylabel("% of requests to the candidate")

    return save(figure, path)


def target_changes(changes: tuple[TargetChangeReport, ...], path: Path) -> Path:
    """Per change: acceptance length, and tok/s with one request in flight, of old drafter, new
    drafter and no draft.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(changes) + 1.2, 6.4), dpi=150, layout="constrained")
    grid = figure.subplots(2, len(changes), squeeze=False, sharey="row")
    for column, change in enumerate(changes):
        arms = [
            ("old drafter", change.old_drafter, ARM_COLOURS[Arm.CHAMPION]),
            ("new drafter", change.new_drafter, ARM_COLOURS[Arm.CANDIDATE]),
            ("no draft", change.no_draft, ARM_COLOURS[Arm.NO_DRAFT]),
        ]
        top, bottom = grid[0][column], grid[1][column]
        _change_bars(top, arms, lambda arm: arm.acceptance_length, "{:.2f}")
        _change_bars(bottom, arms, _single_stream, "{:.0f}")
        set_title(top, change.name, f"{change.action}: {change.outcome}", max_chars=58)
        if change.released_acceptance_length is not None:
            top.axhline(
                change.released_acceptance_length, color=INK, linewidth=1, linestyle=(0, (4, 3))
            )
            top.annotate(
                f"on the old target {change.released_acceptance_length:.2f}",
                (1.0, change.released_acceptance_length),
                xycoords=("axes fraction", "data"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="right",
                fontsize=8,
            )
    highest = max(axes.get_ylim()[1] for axes in grid[0])
    grid[0][0].set_ylim(0, highest * 1.1)
    grid[0][0].set_ylabel("acceptance length")
    grid[1][0].set_ylabel("tok/s, 1 request in flight")
    return save(figure, path)


def _change_bars(
    axes: Any, arms: list[tuple[str, ArmFigures | None, str]], figure_of: Any, pattern: str
) -> None:
    style_axes(axes)
    for position, (_, arm, shade) in enumerate(arms):
        value = figure_of(arm) if arm is not None else None
        if value is None:
            axes.annotate(
                "none",
                (position, 0.02),
                xycoords=("data", "axes fraction"),
                ha="center",
                fontsize=8,
            )
            continue
        axes.bar(position, value, width=0.62, color=shade)
        axes.annotate(
            pattern.format(value),
            (position, value),
            xytext=(0, -5),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=10,
            fontweight="bold",
            color="white",
        )

    axes.set_xticks(range(len(arms)), [name for name, _, _ in arms])
    axes.margins(y=0.12)


def _single_stream(arm: ArmFigures) -> float | None:
    return arm.output_tokens_per_s.get(1)


def _step_text(acceptance_length: float | None, num_requests: int, weight_percent: int) -> str:
    told = f"{weight_percent} %\n{num_requests} req"
    return told if acceptance_length is None else f"{told}\nAL {acceptance_length:.2f}"


def _smoothed(values: list[float]) -> list[float]:
    """Exponential moving average over about a twentieth of the run, bias-corrected at its start."""
    weight = max(0.0, 1.0 - 20 / len(values))
    smooth = []
    total = 0.0
    scale = 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        scale = weight * scale + (1 - weight)
        smooth.append(total / scale)
    return smooth


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.0f} s"
