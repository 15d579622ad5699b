"""The picture of a rollout: how much traffic the candidate got, how well it drafted, how fast both arms answered."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from components.contracts import CanaryReport, CanaryStep

CANDIDATE_COLOUR = "#0b6e99"
BASELINE_COLOUR = "#8a8f98"
BAD_COLOUR = "#c0392b"


def plot_canary(report: CanaryReport, *, path: Path, gate_acceptance_length: float | None = None) -> Path:
    """Draw weights, acceptance length and p95 latency over time as one PNG.

    Args:
        report: the finished rollout, at least one step.
        path: PNG to write.
        gate_acceptance_length: drawn as a dashed line when given.

    Returns:
        `path`.
    """
    # Not pyplot: figures of its global state would leak between threads of a long-lived worker.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    share, acceptance, latency = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    spans = [_span_s(step, start=report.steps[0].started_at) for step in report.steps]
    _draw_share(share, report, spans)
    _draw_acceptance(acceptance, report, spans, gate_acceptance_length=gate_acceptance_length)
    _draw_latency(latency, report, spans)
    for axis in (share, acceptance, latency):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e8eb", linewidth=0.8)
        axis.set_axisbelow(True)
    latency.set_xlabel("seconds since the rollout began")
    latency.set_xlim(0, spans[-1][1])
    figure.suptitle(_title(report), fontsize=13, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def _span_s(step: CanaryStep, *, start: datetime) -> tuple[float, float]:
    begin = (step.started_at - start).total_seconds()
    return begin, begin + step.duration_s


def _title(report: CanaryReport) -> str:
    verdict = "promoted" if report.promoted else f"rolled back to {_words(report.rolled_back_to or 'baseline')}"
    return f"Canary of drafter {report.candidate_digest[:12]} against {_words(report.baseline)}: {verdict}"


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _draw_share(axis: Any, report: CanaryReport, spans: list[tuple[float, float]]) -> None:
    for step, (begin, end) in zip(report.steps, spans, strict=True):
        colour = CANDIDATE_COLOUR if step.healthy else BAD_COLOUR
        axis.fill_between([begin, end], 0, step.weight_percent, color=colour, alpha=0.25, linewidth=0)
        axis.plot([begin, end], [step.weight_percent] * 2, color=colour, linewidth=2)
        words = (
            f"{step.weight_percent} %\n{step.num_requests['candidate']} of {sum(step.num_requests.values())} requests"
        )
        axis.annotate(
            words if step.healthy else f"{words}\nunhealthy",
            ((begin + end) / 2, step.weight_percent),
            textcoords="offset points",
            xytext=(0, 5),
            ha="center",
            va="bottom",
            fontsize=8,
            color=colour,
        )
    for (_, end), before, after in zip(spans, report.steps, report.steps[1:], strict=False):
        axis.plot([end] * 2, [before.weight_percent, after.weight_percent], color=CANDIDATE_COLOUR, linewidth=1)
    if not report.promoted:
        axis.plot([spans[-1][1]] * 2, [report.steps[-1].weight_percent, 0], color=BAD_COLOUR, linewidth=2)
    axis.set_ylim(0, 128)
    axis.set_yticks([0, 25, 50, 75, 100])
    axis.set_ylabel("traffic to the\ncandidate, %")


def _draw_acceptance(
    axis: Any, report: CanaryReport, spans: list[tuple[float, float]], *, gate_acceptance_length: float | None
) -> None:
    lengths = [step.acceptance_length for step in report.steps]
    # Values stand on the side away from the gate's line.
    above = [gate_acceptance_length is None or (length or 0.0) >= gate_acceptance_length for length in lengths]
    _draw_levels(axis, spans, lengths, colour=CANDIDATE_COLOUR, label="candidate, as served", above=above)
    if gate_acceptance_length is not None:
        axis.axhline(gate_acceptance_length, color=BASELINE_COLOUR, linestyle="--", linewidth=1.2, label="gate")
    known = [length for length in (*lengths, gate_acceptance_length) if length is not None]
    axis.set_ylim(1.0, max([*known, 1.5]) * 1.15)
    axis.set_ylabel("acceptance length,\ntokens per step")
    if known:
        axis.legend(loc="lower right", fontsize=8, frameon=False, ncols=2)
    else:
        axis.text(
            0.5, 0.5, "no speculative step was served", transform=axis.transAxes, ha="center", color=BASELINE_COLOUR
        )


def _draw_latency(axis: Any, report: CanaryReport, spans: list[tuple[float, float]]) -> None:
    candidate = [step.latency_p95_s["candidate"] for step in report.steps]
    baseline = [step.latency_p95_s["baseline"] for step in report.steps]
    # The slower arm's value stands above its line, the faster one's below, so that they never cover each other.
    is_slower = [(mine or 0.0) >= (other or 0.0) for mine, other in zip(candidate, baseline, strict=True)]
    is_faster = [not slower for slower in is_slower]
    _draw_levels(axis, spans, candidate, colour=CANDIDATE_COLOUR, label="candidate", above=is_slower)
    _draw_levels(axis, spans, baseline, colour=BASELINE_COLOUR, label=_words(report.baseline), above=is_faster)
    known = [latency for latency in (*candidate, *baseline) if latency is not None]
    axis.set_ylim(0, 1.25 * max(known, default=1.0))
    axis.set_ylabel("latency p95,\nseconds")
    axis.legend(loc="lower right", fontsize=8, frameon=False, ncols=2)


def _draw_levels(
    axis: Any,
    spans: list[tuple[float, float]],
    values: list[float | None],
    *,
    colour: str,
    label: str,
    above: list[bool],
) -> None:
    """One level per step with its value beside it; steps without a value are left out."""
    for (begin, end), value, is_above in zip(spans, values, above, strict=True):
        if value is None:
            continue
        axis.plot([begin, end], [value] * 2, color=colour, linewidth=2.5, solid_capstyle="butt", label=label)
        label = "_nolegend_"
        axis.annotate(
            f"{value:.2f}",
            ((begin + end) / 2, value),
            textcoords="offset points",
            xytext=(0, 4 if is_above else -4),
            ha="center",
            va="bottom" if is_above else "top",
            fontsize=8,
            color=colour,
        )
