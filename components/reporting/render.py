"""A `LifecycleReport` as terminal text, as Markdown, and as a folder of files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from components.contracts import write_atomic
from components.reporting.plots import plot_report
from components.reporting.report import LifecycleReport
from components.reporting.tables import Table, headline, tables, verdict_style

PLOT_CAPTIONS = {
    "stage_times": "When each stage ran",
    "training_curve": "Loss and acceptance length over steps",
    "reliability": "Calibration of the confidence head",
    "acceptance_by_slice": "Acceptance length by slice",
    "paired_differences": "Candidate against champion, same prompts",
    "acceptance_by_position": "Acceptance by draft position",
    "accepted_per_step": "Draft tokens accepted per target step",
    "speed_by_requests_in_flight": "Throughput against requests in flight",
    "canary_weights": "Traffic on the candidate over time",
    "target_changes": "Old drafter, new drafter and no draft on the changed targets",
}


@dataclass(frozen=True)
class ReportFiles:
    """Where a report was written; `plots` by name."""

    json: Path
    markdown: Path
    plots: dict[str, Path]


def write_report(report: LifecycleReport, directory: Path) -> ReportFiles:
    """Write plots, report.md and, last, report.json into `directory` (made if missing). Files are
    replaced whole.
    """
    folder = Path(directory)
    plots = plot_report(report, folder)
    names = {name: path.name for name, path in plots.items()}
    text = write_atomic(folder / "report.md", markdown(report, plots=names))
    # The JSON comes last: where it is, the rest is complete.
    return ReportFiles(json=report.write(folder / "report.json"), markdown=text, plots=plots)


def markdown(report: LifecycleReport, *, plots: Mapping[str, str] | None = None) -> str:
    """The report as Markdown. `plots` maps plot names to link targets; without it no pictures are
    linked.
    """
    parts = ["# Drafter report", "", f"**{headline(report)}**", ""]
    for table in tables(report):
        parts += [f"## {table.title}", "", *_markdown_table(table), ""]
        parts += [table.note, ""] if table.note else []
        for name in table.plots:
            if plots and name in plots:
                parts += [f"![{PLOT_CAPTIONS[name]}]({plots[name]})", ""]
    return "\n".join(parts)


def render_terminal(report: LifecycleReport, *, width: int = 118, colour: bool = True) -> str:
    """The report as tables for a terminal of `width` columns, with ANSI colours unless `colour` is
    False.
    """
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        no_color=not colour,
        color_system="standard" if colour else None,
    )

    for table in tables(report):
        console.print(_rich_table(table))
        if table.note:
            console.print(Text(table.note, style="dim"))
        console.print()

    console.print(Text(headline(report), style="bold"))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def _markdown_table(table: Table) -> list[str]:
    rule = [
        "---" if index == 0 or name in table.text_columns else "---:"
        for index, name in enumerate(table.columns)
    ]
    lines = [list(table.columns), rule, *(list(row) for row in table.rows)]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _rich_table(table: Table) -> RichTable:
    drawn = RichTable(
        title=table.title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
    )

    for index, name in enumerate(table.columns):
        is_text = index == 0 or name in table.text_columns
        drawn.add_column(name, justify="left" if is_text else "right", overflow="fold")

    for row in table.rows:
        drawn.add_row(*(Text(cell, style=verdict_style(cell) or "") for cell in row))
    return drawn
