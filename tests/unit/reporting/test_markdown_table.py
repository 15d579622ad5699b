"""Tables that stay tables, whatever their cells hold."""

from __future__ import annotations

from components.reporting.markdown_table import markdown_table


def test_markdown_table_escapes_pipes() -> None:
    assert markdown_table(("a", "b"), [("x|y", 1)]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| x\\|y | 1 |",
    ]
