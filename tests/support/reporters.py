"""A reporter that keeps what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from components.contracts import Progress
from components.system.child_lines import OnChildLine


@dataclass
class KeepingReporter:
    """Keeps lines, pages and plots instead of showing them."""

    lines: list[str] = field(default_factory=list)
    pages: dict[str, str] = field(default_factory=dict)
    plots: dict[str, Path] = field(default_factory=dict)

    def info(self, message: str, *values: object) -> None:
        """Keep a line."""
        self.lines.append(message % values if values else message)

    warning = info

    def progress(self, name: str) -> Progress:
        """Keeps a line per call."""
        return lambda what, done, total: self.lines.append(f"{name}: {what} ({done}/{total})")

    def child(self, name: str) -> OnChildLine:
        """Keeps a line per line."""
        return lambda line: self.lines.append(f"{name}: {line.what}")

    def markdown(self, key: str, markdown: str, *, description: str) -> None:
        """Keep a page."""
        self.pages[key] = markdown

    def image(self, key: str, png: Path, *, description: str) -> None:
        """Keep where a plot is."""
        self.plots[key] = png
