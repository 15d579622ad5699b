"""Runs a child process group that never outlives its caller, its lines forwarded."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

from components.errors import DSparkError, TrainingError
from components.system.child_lines import OnChildLine, as_child_line

PARENT_PID_VARIABLE = "DSPARK_TRAINER_PARENT_PID"
"""Of the process that started it: a child that sees it gone ends itself."""
QUIET = {"LOGURU_LEVEL": "ERROR", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Its lines go to people: not what speculators notes of files it did not need, nor bars of weights
read in a second.
"""

GRACE_S = 30.0
"""From SIGTERM to SIGKILL: a step, a state on disk, the stream's keys removed."""


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's variables for a child that ends with it and prints line by line; `extra` on
    top.
    """
    return (
        QUIET
        | os.environ
        | {PARENT_PID_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        | dict(extra or {})
    )


def run_process(
    command: list[str],
    environment: dict[str, str],
    *,
    what: str,
    on_line: OnChildLine,
    timeout_s: float,
    check: Callable[[], None] | None = None,
    error: type[DSparkError] = TrainingError,
) -> None:
    """Run a command to its end in a process group of its own.

    Args:
        command, environment: as for `subprocess.Popen`.
        what: its name in messages, e.g. 'the trainer'.
        on_line: given every line it prints, as a record where it is one.
        timeout_s: it is ended after this time.
        check: called every second or so; what it raises ends the process.
        error: raised where it fails.

    Raises:
        `error`: it failed, was stopped or took too long; the message ends in its last line.
    """
    last_lines: deque[str] = deque(maxlen=1)

    def keep(printed: str) -> None:
        line = as_child_line(printed)
        if line.what.strip():
            last_lines.append(line.what)
        on_line(line)

    with _sigterm_raises(), _process_group(command, environment) as process:
        try:
            _follow(process, on_line=keep, check=check, timeout_s=timeout_s)
        except TimeoutError as reason:
            raise error(f"{what} {reason}", got=f"pid {process.pid}") from None

    if process.returncode != 0:
        last = last_lines[0] if last_lines else "it printed nothing"
        last = last.removeprefix("error: ")
        raise error(f"{what} failed", got=f"exit code {process.returncode}: {last}")


def _follow(
    process: subprocess.Popen[str],
    *,
    on_line: Callable[[str], None],
    check: Callable[[], None] | None,
    timeout_s: float,
) -> None:
    """Forward lines until the process has closed its output and ended.

    Raises:
        TimeoutError: it does not in its time.
    """
    deadline = time.monotonic() + timeout_s
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(
        target=_read_lines, args=(process, lines), name="child-output", daemon=True
    ).start()

    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"did not finish within {timeout_s:.0f} s")
        if check is not None:
            check()
        try:
            line = lines.get(timeout=min(left_s, 1.0))
        except queue.Empty:
            continue
        if line is None:
            break
        on_line(line)

    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        raise TimeoutError("closed its output but did not end") from None


def _read_lines(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.rstrip("\n"))
    lines.put(None)


@contextmanager
def _process_group(
    command: list[str], environment: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Start `command` in a new session; whatever ends the block, no process of the group is
    left.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    try:
        yield process
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):  # SIGKILL follows
            process.wait(timeout=GRACE_S)
    # Ranks and loader processes of a leader that is gone already.
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that the group is ended; only where nobody else handles the
    signal.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
