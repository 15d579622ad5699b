"""Runs the Procfile under honcho, one log file per service, and restarts a service that dies after
it had started.

honcho ends everything as soon as one process ends. That is right while starting, and wrong
afterwards: a store that dies under a training run must fail that run with its own error, not take
the orchestrator with it.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing import Process as ForkedProcess
from pathlib import Path
from typing import Any, TextIO

import honcho.manager
from honcho.environ import parse_procfile

from components.contracts import write_atomic
from components.services.endpoints import REPO_DIR, STATE_DIR_VARIABLE
from components.services.prepare import PROCFILE

MIN_LIFE_S = 10.0
"""A service that ends sooner than this after its start cannot run here: no restart, everything
ends.
"""
MAX_RESTARTS = 5
"""Per service and supervisor; one more death ends everything."""
STOP_WAIT_S = 20
"""Between SIGTERM and SIGKILL. A flow run in flight ends its engines and its trainer in that time.
"""
FAILURE_FILE = "failed"


class LogFiles:
    """A honcho printer that appends each service's lines to `<folder>/<service>.log`."""

    def __init__(self, folder: Path) -> None:
        self.width = 0  # honcho sets it on every printer, to align columns
        self._folder = folder
        self._files: dict[str, TextIO] = {}

    def write(self, message: Any) -> None:
        """Write one honcho message; a service's bytes are decoded with replacement."""
        name = "supervisor" if message.name == honcho.manager.SYSTEM_PRINTER_NAME else message.name
        if name not in self._files:
            self._files[name] = (self._folder / f"{name}.log").open("a", encoding="utf-8")
        text = (
            message.data
            if isinstance(message.data, str)
            else message.data.decode("utf-8", "replace")
        )
        stamp = f"{message.time:%Y-%m-%d %H:%M:%S} " if name == "supervisor" else ""
        self._files[name].write(stamp + text.rstrip("\n") + "\n")
        self._files[name].flush()


class Supervisor(honcho.manager.Manager):
    """honcho's manager with restarts. Reads and writes the bookkeeping of honcho 2.0, which the
    lock pins.
    """

    def __init__(self, printer: LogFiles, *, failure_path: Path) -> None:
        super().__init__(printer)
        self._failure_path = failure_path
        self._num_restarts: dict[str, int] = {}
        self._started_at_s: dict[str, float] = {}

    def _start(self) -> None:
        super()._start()
        now = time.monotonic()
        self._started_at_s = dict.fromkeys(self._processes, now)

    def _any_stopped(self) -> bool:
        """Whether everything must end. honcho asks in each turn of its loop, once all processes
        have started.
        """
        stopped = [
            name for name, entry in self._processes.items() if entry.get("returncode") is not None
        ]
        if self._terminating or not stopped:
            return bool(stopped)
        for name in stopped:
            if not self._may_restart(name):
                write_atomic(self._failure_path, f"{name} {self._processes[name]['returncode']}")
                return True
            self._restart(name)
        return False

    def _may_restart(self, name: str) -> bool:
        lived_s = time.monotonic() - self._started_at_s[name]
        return lived_s >= MIN_LIFE_S and self._num_restarts.get(name, 0) < MAX_RESTARTS

    def _restart(self, name: str) -> None:
        entry = self._processes[name]
        del entry["returncode"], entry["pid"]
        self.returncode = None
        self._num_restarts[name] = self._num_restarts.get(name, 0) + 1
        self._started_at_s[name] = time.monotonic()
        self._system_print(f"restarting {name} ({self._num_restarts[name]} of {MAX_RESTARTS})\n")
        entry["process"] = ForkedProcess(
            name=name, target=entry["obj"].run, args=(self.events, True)
        )
        entry["process"].start()


def main() -> None:
    """Supervise until SIGTERM. Needs the environment of `prepare.service_environment`."""
    state_dir = Path(os.environ[STATE_DIR_VARIABLE])
    honcho.manager.KILL_WAIT = STOP_WAIT_S
    supervisor = Supervisor(
        LogFiles(state_dir / "logs"), failure_path=state_dir / "run" / FAILURE_FILE
    )
    for name, command in parse_procfile(PROCFILE.read_text()).processes.items():
        supervisor.add_process(name, command, cwd=str(REPO_DIR), env=dict(os.environ))
    supervisor.loop()
    sys.exit(supervisor.returncode or 0)


if __name__ == "__main__":
    main()
