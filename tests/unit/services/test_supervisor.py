"""The supervisor: restarts what had run, ends everything when something cannot start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
import components.services.supervisor as s
s.MIN_LIFE_S = float(sys.argv[2])
s.MAX_RESTARTS = 2
folder = Path(sys.argv[1])
manager = s.Supervisor(s.LogFiles(folder), failure_path=folder / "failed")
for name, command in zip(sys.argv[3::2], sys.argv[4::2]):
    manager.add_process(name, command)
manager.loop()
sys.exit(manager.returncode)
"""


def _run(folder: Path, min_life_s: float, *processes: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(min_life_s), *processes]
    )


def test_a_service_that_cannot_start_ends_everything_and_is_named(tmp_path: Path) -> None:
    process = _run(tmp_path, 60.0, "good", "exec sleep 600", "bad", "echo no such file; exit 3")
    assert process.wait(timeout=300) == 3
    assert (tmp_path / "failed").read_text() == "bad 3"
    assert "no such file" in (tmp_path / "bad.log").read_text()


def test_a_service_that_had_run_is_restarted_a_bounded_number_of_times(tmp_path: Path) -> None:
    process = _run(tmp_path, 0.2, "good", "exec sleep 600", "dies", "echo up; sleep 0.5; exit 7")
    assert process.wait(timeout=300) == 7
    assert (tmp_path / "dies.log").read_text().splitlines() == ["up"] * 3
    assert (tmp_path / "supervisor.log").read_text().count("restarting dies") == 2
    assert "restarting good" not in (tmp_path / "supervisor.log").read_text()


def test_sigterm_ends_every_service(tmp_path: Path) -> None:
    process = _run(
        tmp_path, 60.0, "one", "echo $$; exec sleep 600", "two", "echo $$; exec sleep 600"
    )
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    deadline = time.monotonic() + 120
    while not all(log.is_file() and log.read_text().strip() for log in logs):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    pids = [int(log.read_text()) for log in logs]
    process.terminate()
    assert process.wait(timeout=300) == 143
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
