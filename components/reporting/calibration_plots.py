"""Reliability diagram of a confidence head: what its scores promise against what the target
accepted.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from components.contracts import Arm, Calibration, ReliabilityFigures
from components.reporting.style import ARM_COLOURS, DPI, GRID, INK, save, style_axes

BEFORE_COLOUR, BEFORE_INK, AFTER_COLOUR = "#d9a441", "#a3741a", ARM_COLOURS[Arm.CANDIDATE]
QUIET_INK = "#5b626c"
MAX_COLUMNS = 5
BOX_ASPECT = 0.33
"""Height of a histogram over its width, which is that of the panel above."""

CHARS_PER_INCH = 14
"""Of a subtitle in 9 points."""


def reliability_diagram(calibration: Calibration, path: Path) -> Path:
    """A panel for all positions together and one per position, before and after, the scores'
    histogram under each.

    A point is a bin of the expected calibration error; its bar is the 95 % scatter of its accepted
    share if the blocks were independent. On the diagonal, scores are what happens. Axes end where a
    panel's points do.
    """
    panels = [("all positions", calibration.before, calibration.after)]
    pairs = zip(calibration.before_by_position, calibration.after_by_position, strict=True)
    panels += [
        (f"drafts 1 to {k}" if k > 1 else "draft 1", before, after)
        for k, (before, after) in enumerate(pairs, 1)
    ]
    num_rows = math.ceil(len(panels) / MAX_COLUMNS)

    num_columns = math.ceil(len(panels) / num_rows)
    figure, grid = _titled_grid(calibration, num_rows, num_columns)
    for axes in grid.flat:
        axes.set_visible(False)  # the last row may have room for more panels than there are

    for index, (name, before, after) in enumerate(panels):
        row, column = divmod(index, num_columns)
        top = grid[2 * row][column]
        bottom = grid[2 * row + 1][column]
        limit = _limit(before, after)
        _reliability(top, name, before, after, limit)
        _histogram(bottom, before, after, limit)
        if column == 0:
            top.set_ylabel("share accepted", fontsize=9)
            bottom.set_ylabel("scores", fontsize=9)

    return save(figure, path)


def _titled_grid(calibration: Calibration, num_rows: int, num_columns: int) -> tuple[Figure, Any]:
    """A figure with its title, and axes [2 rows, columns]: a reliability panel and a histogram in
    turn.
    """
    width = 0.6 + 2.75 * num_columns
    subtitle = textwrap.wrap(_subtitle(calibration), int(CHARS_PER_INCH * width))
    band = 0.6 + 0.18 * len(subtitle)
    height = band + 0.1 + 3.9 * num_rows
    below_title = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08, rect=(0, 0, 1, 1 - band / height))
    figure = Figure(figsize=(width, height), dpi=DPI, layout=below_title)
    left = 0.17 / width
    title = "Calibration of the confidence head"
    figure.text(left, 1 - 0.12 / height, title, fontsize=13, fontweight="bold", color=INK, va="top")
    figure.text(left, 1 - 0.42 / height, "\n".join(subtitle), fontsize=9, color=QUIET_INK, va="top")
    heights = [1.0, BOX_ASPECT] * num_rows
    return figure, figure.subplots(2 * num_rows, num_columns, squeeze=False, height_ratios=heights)


def _subtitle(calibration: Calibration) -> str:
    measured_on = (
        f"{calibration.num_blocks:,} blocks of {calibration.num_conversations} validation "
        "conversations"
    )
    told = (
        "each scored by a fit on other conversations"
        if calibration.num_folds
        else "too few to fit anything"
    )
    return (
        f"survival: predicted probability that all these drafts are accepted; {measured_on}, {told}"
    )


def _reliability(
    axes: Any, name: str, before: ReliabilityFigures, after: ReliabilityFigures, limit: float
) -> None:
    _style(axes, limit)
    axes.plot([0, limit], [0, limit], color="#9aa1ab", linewidth=1, linestyle=(0, (4, 3)))
    for figures, shade, size in ((before, BEFORE_COLOUR, 3.5), (after, AFTER_COLOUR, 4.5)):
        scores = [one.mean_score for one in figures.bins]
        shares = [one.accepted_share for one in figures.bins]
        scatter = [
            1.96 * math.sqrt(y * (1 - y) / one.num_scores)
            for y, one in zip(shares, figures.bins, strict=True)
        ]
        if figures is after:
            axes.errorbar(
                scores, shares, yerr=scatter, fmt="none", ecolor=shade, elinewidth=0.9, alpha=0.55
            )
        axes.plot(scores, shares, color=shade, marker="o", markersize=size, linewidth=1.6)

    axes.set_title(name, loc="left", fontsize=10, fontweight="bold", color=INK, pad=5)
    told = (
        (0.97, f"before: ECE {before.ece:.3f}", BEFORE_INK, "normal"),
        (0.89, f"after: ECE {after.ece:.3f}", AFTER_COLOUR, "bold"),
        (0.81, f"noise alone: {after.ece_floor:.3f}", QUIET_INK, "normal"),
    )

    for height, words, shade, weight in told:
        axes.annotate(
            words,
            (0.03, height),
            xycoords="axes fraction",
            va="top",
            fontsize=8.5,
            fontweight=weight,
            color=shade,
        )

    axes.set_ylim(0, limit)
    axes.set_yticks([0, limit / 2, limit], [f"{tick:g}" for tick in (0, limit / 2, limit)])
    axes.set_box_aspect(1)


def _histogram(
    axes: Any, before: ReliabilityFigures, after: ReliabilityFigures, limit: float
) -> None:
    _style(axes, limit)
    num_bins = len(after.histogram)
    edges = [number / num_bins for number in range(num_bins + 1)]
    shares = [count / after.num_scores for count in after.histogram]
    axes.stairs(shares, edges, fill=True, color=AFTER_COLOUR, alpha=0.35)
    axes.stairs(
        [count / before.num_scores for count in before.histogram],
        edges,
        color=BEFORE_COLOUR,
        linewidth=1.4,
    )

    axes.set_ylim(bottom=0)
    axes.set_box_aspect(BOX_ASPECT)
    axes.set_xlabel("survival score", fontsize=9)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=2))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))


def _style(axes: Any, limit: float) -> None:
    axes.set_visible(True)
    style_axes(axes)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_xlim(0, limit)
    axes.set_xticks([0, limit / 2, limit], [f"{tick:g}" for tick in (0, limit / 2, limit)])


def _limit(before: ReliabilityFigures, after: ReliabilityFigures) -> float:
    """End of a panel's axes: late positions have low scores, and would lie on top of each other in
    a corner.
    """
    highest = max(max(one.mean_score, one.accepted_share) for one in (*before.bins, *after.bins))
    return next((limit for limit in (0.2, 0.4, 0.6) if highest * 1.1 <= limit), 1.0)
