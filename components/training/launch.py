"""Runs the trainer as a child process group that never outlives its caller."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from components.settings import TrainingSettings
from components.system.child import child_environment, run_process
from components.system.child_lines import OnChildLine
from components.training.job import RESULT_FILE, TrainingJob, TrainingResult

MODULE = "components.training.main"


def launch_command(
    job_path: Path, settings: TrainingSettings, device: Literal["cpu", "cuda"]
) -> list[str]:
    """The trainer's command line: plain Python for one process, torchrun for several on CPU,
    `accelerate launch` on GPUs.

    `accelerate launch --cpu` starts one process, however many it is asked for, unless it finds MPI.
    """
    if device == "cpu" and settings.num_processes == 1:
        return [sys.executable, "-m", MODULE, str(job_path)]
    if device == "cpu":
        ranks = ["--standalone", "--nproc_per_node", str(settings.num_processes)]
        return [sys.executable, "-m", "torch.distributed.run", *ranks, "-m", MODULE, str(job_path)]

    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        str(settings.num_processes),
    ]

    command += [
        "--num_machines",
        "1",
        "--dynamo_backend",
        "no",
        "--mixed_precision",
        settings.mixed_precision,
    ]

    if settings.num_processes > 1:
        command.append("--multi_gpu")
    return [*command, "--module", MODULE, str(job_path)]


def run_trainer(
    job: TrainingJob,
    *,
    on_line: OnChildLine,
    timeout_s: float,
    device: Literal["cpu", "cuda"] = "cpu",
    env: dict[str, str] | None = None,
    check: Callable[[], None] | None = None,
) -> TrainingResult:
    """Run `job` to its end in a process group of its own.

    Args:
        job: written to `<output_dir>/job.json`.
        on_line: given every line the trainer prints, as a record where it is one.
        timeout_s: the trainer is ended after this time.
        device: where it trains.
        env: variables set on top of this process's.
        check: called every second or so; what it raises ends the trainer, e.g. that its engine
            died.

    Raises:
        TrainingError: it failed, was stopped or took too long; the message ends in its last line.
    """
    job_path = job.write(Path(job.output_dir) / "job.json")
    command = launch_command(job_path, job.training, device)
    environment = child_environment(env)
    if device == "cpu":
        environment["ACCELERATE_USE_CPU"] = "true"  # on a machine with GPUs too
    run_process(
        command, environment, what="the trainer", on_line=on_line, timeout_s=timeout_s, check=check
    )
    return TrainingResult.read(Path(job.output_dir) / RESULT_FILE)
