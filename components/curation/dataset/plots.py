"""The funnel of a dataset as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

LABELS = {
    "read": "rows read",
    "well_formed": "well-formed",
    "not_held_out": "not held out",
    "filtered": "passed filters",
    "unique": "unique",
    "not_near_duplicate": "no near-duplicate",
    "decontaminated": "decontaminated",
    "answered": "answered by target",
    "rendered": "rendered",
}


def plot_funnel(funnel: Mapping[str, int], path: Path) -> Path:
    """Draw rows left after each step as horizontal bars, with counts and the share lost at each
    step.

    Args:
        funnel: counts by step, in order (`DatasetRef.funnel`).
        path: PNG file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = list(funnel)
    counts = [funnel[step] for step in steps]
    figure = Figure(figsize=(8, 0.45 * len(steps) + 1.1), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    positions = range(len(steps))
    axes.barh(positions, counts, color="#3b6ea5", height=0.72)
    widest = max(counts, default=1) or 1
    for position, count in enumerate(counts):
        before = counts[position - 1] if position else count
        lost = f"  (-{(before - count) / before:.0%})" if before > count else ""
        axes.text(count + widest * 0.01, position, f"{count:,}{lost}", va="center", fontsize=9)
    axes.set_yticks(list(positions), [LABELS.get(step, step) for step in steps])
    axes.invert_yaxis()
    axes.set_xlim(0, widest * 1.18)
    axes.set_xlabel("conversations")
    axes.set_title("Curation: what is left after each step", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    return path
