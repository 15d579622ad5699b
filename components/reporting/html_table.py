"""A table of a page, as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] | range
) -> str:
    """A table that scrolls sideways on a narrow screen.

    Args:
        columns: headings, plain text; all empty for a table without a head.
        rows: cells, HTML already.
        numbers: columns that stand right.
    """
    kinds = ["num" if index in numbers else "" for index in range(len(columns))]
    head = "".join(
        f"<th class='{kind}'>{escape(name)}</th>" for kind, name in zip(kinds, columns, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td class='{k}'>{cell}</td>" for k, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for row in rows
    )
    header = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    return f"<div class='scroll'><table>{header}<tbody>{body}</tbody></table></div>"
