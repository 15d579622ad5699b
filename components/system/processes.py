"""Finding and ending the processes of one `make up`, and no other process.

Every one of them carries DSPARK_SERVICES_RUN=<run id> in its environment, also the engines and
trainers that flow runs start, and also those whose parent died. The id is random, so a recycled pid
can never match.
"""

from __future__ import annotations

import os
import time
from typing import Any

import psutil
from pydantic import Field, model_validator

from components.contracts import Record
from components.system.guard import process_start

RUN_VARIABLE = "DSPARK_SERVICES_RUN"
STOP_TIMEOUT_S = 30.0
KILL_TIMEOUT_S = 10.0


class ProcessIdentity(Record):
    """A process that cannot be confused with a later one of the same pid.

    Its start is told in the kernel's ticks since boot. Seconds since the epoch would not do: they
    are reckoned from the wall clock, which is corrected by a second every so often, and services
    that had been up for an hour were then taken for gone.
    """

    pid: int
    start_ticks: int | None = Field(
        default=None,
        description="clock ticks from boot to its start, as the kernel tells; None: written by a"
        " version that kept seconds, and the run's id in its environment must do",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_seconds(cls, values: Any) -> Any:
        """Services that an earlier version started can be ended by this one."""
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if name != "started_at_s"}
        return values

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Identity of a running process. Raises psutil.NoSuchProcess when there is none."""
        start_ticks = process_start(pid)
        if start_ticks is None:
            raise psutil.NoSuchProcess(pid)
        return cls(pid=pid, start_ticks=start_ticks)

    def find(self) -> psutil.Process | None:
        """The process, if it still runs and is the one recorded (a zombie counts as ended)."""
        try:
            process = psutil.Process(self.pid)
        except psutil.NoSuchProcess:
            return None
        if self.start_ticks is None:
            return process if _run_of(process) is not None else None
        return process if process_start(self.pid) == self.start_ticks else None


def run_processes(run_id: str) -> list[psutil.Process]:
    """Living processes of a run, but for the one that asks."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and _belongs(process, run_id)
    ]


def _belongs(process: psutil.Process, run_id: str) -> bool:
    return _run_of(process) == run_id


def _run_of(process: psutil.Process) -> str | None:
    """Id of the run that a living process is of; None where it is of none."""
    try:
        run_id = process.environ().get(RUN_VARIABLE)
        return run_id if process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess, OSError):
        return None  # another user's process, or one that has just ended: not ours to end


def stop_run(run_id: str, *, supervisor: ProcessIdentity | None) -> int:
    """End a run: SIGTERM to its supervisor, then to what is left, then SIGKILL. Returns how many
    had to be killed.

    The supervisor ends its services itself, in their process groups, so it is asked first and given
    its time.
    """
    root = supervisor.find() if supervisor is not None else None
    if root is not None and _belongs(root, run_id):
        root.terminate()
        _wait_until_gone(run_id, timeout_s=STOP_TIMEOUT_S, at_least_ended=root)
    for process in run_processes(run_id):
        _signal(process, kill=False)
    _wait_until_gone(run_id, timeout_s=KILL_TIMEOUT_S)
    stubborn = run_processes(run_id)
    for process in stubborn:
        _signal(process, kill=True)
    _wait_until_gone(run_id, timeout_s=KILL_TIMEOUT_S)
    return len(stubborn)


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return  # ended by itself since it was listed


def _wait_until_gone(
    run_id: str, *, timeout_s: float, at_least_ended: psutil.Process | None = None
) -> None:
    """Wait until no process of the run is left or, with `at_least_ended`, until that one has
    ended.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if at_least_ended is not None:
            if not at_least_ended.is_running() or at_least_ended.status() == psutil.STATUS_ZOMBIE:
                return
        elif not run_processes(run_id):
            return
        time.sleep(0.2)
