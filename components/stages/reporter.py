"""What a stage tells people while it works: lines, progress, tables and plots.

A stage never asks where it is shown. A flow run shows it in Prefect's UI and log, a command line
prints it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from components.contracts import Progress
from components.system.child_lines import OnChildLine


class Reporter(Protocol):
    """Shows the work of one run."""

    def info(self, message: str, *values: object) -> None:
        """A line; `values` are put into `message` as by `logging`."""

    def warning(self, message: str, *values: object) -> None:
        """A line that a person should look at."""

    def progress(self, name: str) -> Progress:
        """Progress of a named piece of work: a line every few seconds, and a bar where there is
        one.
        """

    def child(self, name: str) -> OnChildLine:
        """What a child process of that name tells: its lines, and a bar where it says how far it
        is.
        """

    def markdown(self, key: str, markdown: str, *, description: str) -> None:
        """A page of Markdown, kept with the run."""

    def image(self, key: str, png: Path, *, description: str) -> None:
        """A PNG, kept with the run."""
