"""What a child tells arrives as it was told; what libraries print is words."""

from __future__ import annotations

import sys

import pytest

from components.errors import TargetError
from components.system.child import child_environment, run_process
from components.system.child_lines import ChildLine, as_child_line, tell_parent


@pytest.mark.parametrize(
    "line",
    [
        ChildLine("reading 12 conversations"),
        ChildLine('step 20 "loss" 3.6', 3, 100),
        ChildLine("ends", 5, 5),
    ],
)
def test_a_record_arrives_as_it_was_told(
    line: ChildLine, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_parent(line)
    assert as_child_line(capsys.readouterr().out.rstrip("\n")) == line


@pytest.mark.parametrize(
    "printed", ["step 1", "", "12", "null", '{"other": 1}', '{"told": 3}', "["]
)
def test_what_is_no_record_is_words(printed: str) -> None:
    assert as_child_line(printed) == ChildLine(printed)


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        (ChildLine("x"), None),
        (ChildLine("x", 1, 4), 25.0),
        (ChildLine("x", 0, 4), 0.0),
        (ChildLine("x", 3, 0), None),
    ],
)
def test_percent_is_told_where_it_is_known(line: ChildLine, percent: float | None) -> None:
    assert line.percent == percent


def test_a_child_process_is_followed_and_its_failure_is_of_the_callers_kind() -> None:
    code = (
        "from components.system.child_lines import ChildLine, tell_parent\n"
        "tell_parent(ChildLine('half', 1, 2)); print('noise'); raise SystemExit('error: no room')"
    )
    lines: list[ChildLine] = []
    with pytest.raises(TargetError, match=r"the copy failed.*exit code 1: no room"):
        run_process(
            [sys.executable, "-c", code],
            child_environment(),
            what="the copy",
            on_line=lines.append,
            timeout_s=600,
            error=TargetError,
        )
    assert lines[:2] == [ChildLine("half", 1, 2), ChildLine("noise")]
