"""Reliability diagram of a confidence head: what its scores promise against what the target accepted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from components.contracts import Calibration, ReliabilityFigures
from components.reporting.style import ARM_COLOURS, DPI, GRID, INK, save, style_axes

BEFORE_COLOUR, BEFORE_INK, AFTER_COLOUR = "#d9a441", "#a3741a", ARM_COLOURS["candidate"]
MAX_COLUMNS = 5


def reliability_diagram(calibration: Calibration, path: Path) -> Path:
    """A panel for all positions together and one per position, before and after, the scores' histogram under each.

    A point is a bin of the expected calibration error; its bar is the 95 % scatter of its accepted share if the blocks
    were independent. On the diagonal, scores are what happens. Axes end where a panel's points do.
    """
    panels = [("all positions", calibration.before, calibration.after)]
    pairs = zip(calibration.before_by_position, calibration.after_by_position, strict=True)
    panels += [
        (f"drafts 1 to {k}" if k > 1 else "draft 1", before, after) for k, (before, after) in enumerate(pairs, 1)
    ]
    num_columns = min(MAX_COLUMNS, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    figure = Figure(figsize=(0.6 + 2.75 * num_columns, 0.9 + 3.9 * num_rows), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.08, rect=(0, 0, 1, 1 - 0.78 / figure.get_figheight()))
    heights = [ratio for _ in range(num_rows) for ratio in (3.2, 1.0)]
    grid = figure.subplots(2 * num_rows, num_columns, squeeze=False, height_ratios=heights)
    for index, (name, before, after) in enumerate(panels):
        row, column = divmod(index, num_columns)
        top, bottom = grid[2 * row][column], grid[2 * row + 1][column]
        limit = _limit(before, after)
        _reliability(top, name, before, after, limit)
        _histogram(bottom, before, after, limit)
        if column == 0:
            top.set_ylabel("share accepted", fontsize=9)
            bottom.set_ylabel("scores", fontsize=9)
        bottom.set_xlabel("survival score", fontsize=9)
    for index in range(len(panels), num_rows * num_columns):
        row, column = divmod(index, num_columns)
        grid[2 * row][column].set_visible(False)
        grid[2 * row + 1][column].set_visible(False)
    _title(figure, calibration)
    return save(figure, path)


def _title(figure: Figure, calibration: Calibration) -> None:
    height = figure.get_figheight()
    figure.text(
        0.012,
        1 - 0.12 / height,
        "Calibration of the confidence head",
        fontsize=13,
        fontweight="bold",
        color=INK,
        va="top",
    )
    figure.text(
        0.012,
        1 - 0.42 / height,
        f"survival: predicted probability that all these drafts are accepted; {calibration.num_blocks:,} blocks of"
        f" {calibration.num_conversations} held-out conversations, each scored by a fit on other conversations",
        fontsize=9, color="#5b626c", va="top",
    )  # fmt: skip


def _reliability(axes: Any, name: str, before: ReliabilityFigures, after: ReliabilityFigures, limit: float) -> None:
    _style(axes, limit)
    axes.plot([0, limit], [0, limit], color="#9aa1ab", linewidth=1, linestyle=(0, (4, 3)))
    for figures, shade, size in ((before, BEFORE_COLOUR, 3.5), (after, AFTER_COLOUR, 4.5)):
        scores = [one.mean_score for one in figures.bins]
        shares = [one.accepted_share for one in figures.bins]
        scatter = [1.96 * math.sqrt(y * (1 - y) / one.num_scores) for y, one in zip(shares, figures.bins, strict=True)]
        if figures is after:
            axes.errorbar(scores, shares, yerr=scatter, fmt="none", ecolor=shade, elinewidth=0.9, alpha=0.55)
        axes.plot(scores, shares, color=shade, marker="o", markersize=size, linewidth=1.6)
    axes.set_title(name, loc="left", fontsize=10, fontweight="bold", color=INK, pad=5)
    told = (
        (0.97, f"before: ECE {before.ece:.3f}", BEFORE_INK, "normal"),
        (0.89, f"after: ECE {after.ece:.3f}", AFTER_COLOUR, "bold"),
        (0.81, f"noise alone: {after.ece_floor:.3f}", "#5b626c", "normal"),
    )
    for height, words, shade, weight in told:
        axes.annotate(
            words, (0.03, height), xycoords="axes fraction", va="top", fontsize=8.5, fontweight=weight, color=shade
        )
    axes.set_ylim(0, limit)
    axes.set_yticks([0, limit / 2, limit], [f"{tick:g}" for tick in (0, limit / 2, limit)])
    axes.set_box_aspect(1)


def _histogram(axes: Any, before: ReliabilityFigures, after: ReliabilityFigures, limit: float) -> None:
    _style(axes, limit)
    num_bins = len(after.histogram)
    edges = [number / num_bins for number in range(num_bins + 1)]
    shares = [count / after.num_scores for count in after.histogram]
    axes.stairs(shares, edges, fill=True, color=AFTER_COLOUR, alpha=0.35)
    axes.stairs([count / before.num_scores for count in before.histogram], edges, color=BEFORE_COLOUR, linewidth=1.4)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=2))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))


def _style(axes: Any, limit: float) -> None:
    style_axes(axes)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_xlim(0, limit)
    axes.set_xticks([0, limit / 2, limit], [f"{tick:g}" for tick in (0, limit / 2, limit)])


def _limit(before: ReliabilityFigures, after: ReliabilityFigures) -> float:
    """End of a panel's axes: late positions have low scores, and would lie on top of each other in a corner."""
    highest = max(max(one.mean_score, one.accepted_share) for one in (*before.bins, *after.bins))
    return next((limit for limit in (0.2, 0.4, 0.6) if highest * 1.1 <= limit), 1.0)
