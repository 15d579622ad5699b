"""Runs the trainer as a child process group that never outlives its caller."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Literal

from components.errors import TrainingError
from components.settings import TrainingSettings
from components.training.job import PARENT_PID_VARIABLE, RESULT_FILE, TrainingJob, TrainingResult

MODULE = "components.training.main"
GRACE_S = 30.0
"""From SIGTERM to SIGKILL: a step, a state on disk, the stream's keys removed."""


def launch_command(job_path: Path, settings: TrainingSettings, device: Literal["cpu", "cuda"]) -> list[str]:
    """The trainer's command line: plain Python for one process, torchrun for several on CPU, `accelerate launch`
    on GPUs.

    `accelerate launch --cpu` starts one process, however many it is asked for, unless it finds MPI.
    """
    if device == "cpu" and settings.num_processes == 1:
        return [sys.executable, "-m", MODULE, str(job_path)]
    if device == "cpu":
        ranks = ["--standalone", "--nproc_per_node", str(settings.num_processes)]
        return [sys.executable, "-m", "torch.distributed.run", *ranks, "-m", MODULE, str(job_path)]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(settings.num_processes)]
    command += ["--num_machines", "1", "--dynamo_backend", "no", "--mixed_precision", settings.mixed_precision]
    if settings.num_processes > 1:
        command.append("--multi_gpu")
    return [*command, "--module", MODULE, str(job_path)]


def run_trainer(
    job: TrainingJob,
    *,
    on_line: Callable[[str], None],
    timeout_s: float,
    device: Literal["cpu", "cuda"] = "cpu",
    env: dict[str, str] | None = None,
    check: Callable[[], None] | None = None,
) -> TrainingResult:
    """Run `job` to its end in a process group of its own.

    Args:
        job: written to `<output_dir>/job.json`.
        on_line: given every line the trainer prints.
        timeout_s: the trainer is ended after this time.
        device: where it trains.
        env: variables set on top of this process's.
        check: called every second or so; what it raises ends the trainer, e.g. that its engine died.

    Raises:
        TrainingError: it failed, was stopped or took too long; the message ends in its last line.
    """
    job_path = job.write(Path(job.output_dir) / "job.json")
    command = launch_command(job_path, job.training, device)
    environment = os.environ | {PARENT_PID_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"} | (env or {})
    if device == "cpu":
        environment["ACCELERATE_USE_CPU"] = "true"  # on a machine with GPUs too
    last_lines: deque[str] = deque(maxlen=1)

    def keep(line: str) -> None:
        if line.strip():
            last_lines.append(line)
        on_line(line)

    with _sigterm_raises(), _process_group(command, environment) as process:
        _follow(process, on_line=keep, check=check, deadline=time.monotonic() + timeout_s, timeout_s=timeout_s)
    if process.returncode != 0:
        last = last_lines[0] if last_lines else "it printed nothing"
        raise TrainingError("the trainer failed", got=f"exit code {process.returncode}: {last}")
    return TrainingResult.read(Path(job.output_dir) / RESULT_FILE)


def _follow(
    process: subprocess.Popen[str],
    *,
    on_line: Callable[[str], None],
    check: Callable[[], None] | None,
    deadline: float,
    timeout_s: float,
) -> None:
    """Forward lines until the process has closed its output and ended."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(process, lines), name="trainer-output", daemon=True).start()
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TrainingError("the trainer did not finish in its time", got=f"{timeout_s:.0f} s")
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
        raise TrainingError("the trainer closed its output but did not end", got=f"pid {process.pid}") from None


def _read_lines(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.rstrip("\n"))
    lines.put(None)


@contextmanager
def _process_group(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start `command` in a new session; whatever ends the block, no process of the group is left."""
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
    """SIGTERM unwinds the stack, so that the group is ended; only where nobody else handles the signal."""
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
