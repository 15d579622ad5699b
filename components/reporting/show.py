"""Show the newest report of a state folder: `python -m components.reporting.show STATE_DIR`.

With `--run NAME` it is that run's report, and nothing else's. Of a run that promoted a drafter the
last line is the path of its report.json; of any other the last lines say what failed, what serves
now and what to do. The exit code is that of `components.reporting.closing`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from components.errors import ConfigError, run_main
from components.reporting.closing import FAILED, closing_lines, exit_code, training_line
from components.reporting.render import render_terminal
from components.reporting.report import LifecycleReport

PATTERN = "runs/*/report/report.json"


def newest_report(state_dir: Path, *, run: str | None = None) -> Path:
    """Path of the report written last.

    Args:
        state_dir: of the services.
        run: name of the run it must be of; its folder ends in it.

    Raises:
        ConfigError: there is none yet.
    """
    pattern = PATTERN if run is None else f"runs/*-{run}/report/report.json"
    reports = sorted(state_dir.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not reports:
        of_run = "no report has been written yet" if run is None else f"run {run} wrote no report"
        raise ConfigError(of_run, got=state_dir, expected=pattern, fix="Run make demo.")
    return reports[-1]


def show(path: Path, *, width: int, colour: bool, followed: int = 0) -> int:
    """Print a report, its path and what a reader should know last.

    Args:
        path: of report.json.
        width: of the terminal, columns.
        colour: with ANSI colours.
        followed: exit code of what followed the run.

    Returns:
        The exit code of the whole.
    """
    report = LifecycleReport.read(path)
    print(render_terminal(report, width=width, colour=colour))
    code = exit_code(report)
    if (short := training_line(report)) is not None:
        print(short)

    closing = closing_lines(report, folder=path.parent.parent)
    if followed and not code:
        closing = [
            *closing,
            "the run failed after it had written its report: see its last lines above",
        ]
        code = FAILED

    for line in (*([f"report: {path}"] if closing else []), *closing):
        print(line)
    if not closing:
        print(path)
    return code


def main(arguments: list[str]) -> int:
    """Print the report's tables, as wide as the terminal, then its path or what to do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("state_dir", type=Path, help="the state folder")
    parser.add_argument(
        "--run", help="name of the run whose report is shown; without it the newest of all"
    )
    parser.add_argument(
        "--followed", type=int, default=0, help="exit code of what followed the run"
    )

    options = parser.parse_args(arguments)
    try:
        path = newest_report(options.state_dir, run=options.run)
    except ConfigError:
        if not options.followed:
            raise
        print(
            f"run {options.run} failed before it wrote a report: what failed stands in the "
            "log above,"
        )
        print(
            f"and in {options.state_dir}/runs/*-{options.run}/logs; what served before it "
            "serves on."
        )
        print("what to do: mend that, and run the command again: what was curated is kept.")
        return FAILED

    width = shutil.get_terminal_size(fallback=(118, 24)).columns
    return show(path, width=max(width, 80), colour=sys.stdout.isatty(), followed=options.followed)


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
