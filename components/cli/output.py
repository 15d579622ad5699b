"""Tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, default=str))


@contextmanager
def lines_for_people(as_json: bool) -> Iterator[None]:
    """Lines that a person follows go to stderr where stdout is to hold one JSON document."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        yield


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns side by side, as wide as what they hold; the last one is not padded."""
    lines = [tuple(columns), *(tuple(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    widths[-1] = 0
    for number, line in enumerate(lines):
        told = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print(_dim(told) if number == 0 else told)


def _dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if sys.stdout.isatty() else text
