"""Show the newest report of a state folder: `python -m components.reporting.show STATE_DIR`.

The last line printed is the path of its report.json.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from components.errors import ConfigError, run_main
from components.reporting.render import render_terminal
from components.reporting.report import LifecycleReport

PATTERN = "runs/*/report/report.json"


def newest_report(state_dir: Path) -> Path:
    """Path of the report written last.

    Raises:
        ConfigError: there is none yet.
    """
    reports = sorted(state_dir.glob(PATTERN), key=lambda path: path.stat().st_mtime)
    if not reports:
        raise ConfigError("no report has been written yet", got=state_dir, expected=PATTERN, fix="Run make demo.")
    return reports[-1]


def main(arguments: list[str]) -> None:
    """Print the report's tables, as wide as the terminal, then its path."""
    if len(arguments) != 1:
        raise ConfigError("one argument is needed", got=len(arguments), expected="the state folder")
    path = newest_report(Path(arguments[0]))
    width = shutil.get_terminal_size(fallback=(118, 24)).columns
    print(render_terminal(LifecycleReport.read(path), width=max(width, 80), colour=sys.stdout.isatty()))
    print(path)


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
