"""What a child process tells its parent: one JSON record per line, in words and numbers.

A parent never reads numbers out of words. What is no record, as the lines that libraries print, is
taken for words alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

KEY = "told"
"""Marks a record, so that JSON that a library prints is none."""


@dataclass(frozen=True)
class ChildLine:
    """Words, and how far the work is where that is known: `num_done` of `num_total`."""

    what: str
    num_done: int | None = None
    num_total: int | None = None

    @property
    def percent(self) -> float | None:
        """0 to 100, where the child told how far it is."""
        return (
            100.0 * self.num_done / self.num_total
            if self.num_done is not None and self.num_total
            else None
        )


OnChildLine = Callable[[ChildLine], None]


def tell_parent(line: ChildLine) -> None:
    """Print `line` as one record."""
    print(json.dumps({KEY: [line.what, line.num_done, line.num_total]}), flush=True)


def as_child_line(printed: str) -> ChildLine:
    """What a child printed, as a record or as words."""
    try:
        told = json.loads(printed)[KEY]
        what, num_done, num_total = told
    except (ValueError, TypeError, KeyError):
        return ChildLine(printed)
    return ChildLine(str(what), num_done, num_total)
