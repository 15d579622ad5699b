"""Which report is shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from components.errors import ConfigError
from components.reporting.show import newest_report


def test_the_report_written_last_is_shown(tmp_path: Path) -> None:
    paths = []
    for number, run in enumerate(["b-first", "a-second"]):
        path = tmp_path / "runs" / run / "report" / "report.json"
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        os.utime(path, (number, number))
        paths.append(path)
    assert newest_report(tmp_path) == paths[1]


def test_no_report_says_to_run_the_demo(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no report.*make demo"):
        newest_report(tmp_path)
