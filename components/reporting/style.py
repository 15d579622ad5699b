"""One look for all plots: sizes, colours per arm, and files that appear whole or not at all."""

from __future__ import annotations

import io
import re
import textwrap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from components.contracts import Arm, Slot, write_atomic

ARM_COLOURS: dict[str, str] = {
    Arm.CANDIDATE: "#0b6e6e",
    Arm.CHAMPION: "#7a5195",
    Arm.NO_DRAFT: "#8a8f98",
    Arm.UNTRAINED: "#d9a441",
    Slot.BASELINE: "#8a8f98",
    Arm.SCHEDULED: "#3f6fb5",
    Arm.NO_DRAFT_BESIDE: "#8a8f98",
}
ARM_LABELS: dict[str, str] = {
    Arm.NO_DRAFT: "no draft",
    Arm.SCHEDULED: "shipped schedule",
    Arm.NO_DRAFT_BESIDE: "no draft beside it",
}
OTHER_COLOUR = "#3f6fb5"
INK = "#20242a"
SOFT = "#5b626c"
AXIS = "#aab0b8"
GRID = "#e3e6ea"
GOOD, BAD = "#2e8b57", "#c0392b"
DPI = 150

PAGE_COLOURS = {
    INK: "ink",
    SOFT: "soft",
    AXIS: "axis",
    GRID: "grid",
    GOOD: "good",
    BAD: "bad",
    OTHER_COLOUR: "other",
    ARM_COLOURS[Arm.CANDIDATE]: "candidate",
    ARM_COLOURS[Arm.CHAMPION]: "champion",
    ARM_COLOURS[Arm.NO_DRAFT]: "plain",
    ARM_COLOURS[Arm.UNTRAINED]: "untrained",
}
"""Variable of a page's style sheet for each colour, so that plots follow its light and dark scheme.
"""


def colour(arm: str) -> str:
    """Colour of an arm, the same in every plot."""
    return ARM_COLOURS.get(arm, OTHER_COLOUR)


def label(arm: str) -> str:
    """Name of an arm for people."""
    return ARM_LABELS.get(arm, arm)


def new_figure(
    title: str, *, subtitle: str = "", size: tuple[float, float] = (8.0, 4.5)
) -> tuple[Figure, Any]:
    """A figure with one styled pair of axes. The figure has no global state, so threads may draw
    side by side.
    """
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    style_axes(axes)
    set_title(axes, title, subtitle)
    return figure, axes


def set_title(axes: Any, title: str, subtitle: str = "", *, max_chars: int = 105) -> None:
    """A bold title on the left and a grey line under it, cut at `max_chars` with dots."""
    subtitle = textwrap.shorten(subtitle, max_chars, placeholder=" ...")
    axes.set_title(
        title, loc="left", fontsize=13, fontweight="bold", color=INK, pad=26 if subtitle else 10
    )
    if subtitle:
        axes.text(0, 1.025, subtitle, transform=axes.transAxes, fontsize=9, color=SOFT, va="bottom")


def style_axes(axes: Any) -> None:
    """Quiet frame, light horizontal grid."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(AXIS)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def to_svg(figure: Figure, *, name: str) -> str:
    """The figure as inline SVG for a page: colours are the page's variables, ids begin with `name`
    to stay unique.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for plain, variable in PAGE_COLOURS.items():
        svg = svg.replace(plain, f"var(--{variable})")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    # The page sets the width; the picture's own would not shrink on a small screen.
    return re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG, atomically. Returns the path."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return write_atomic(path, buffer.getvalue())
