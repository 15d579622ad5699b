"""The train-served comparison as a job for a process of its own (`train_served`); nothing here
loads torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from pydantic import Field

from components.contracts import CheckpointRef, Record, ServedAnswer, TargetRef, TrainServedGap
from components.system.child import child_environment, run_process
from components.system.child_lines import OnChildLine

MODULE = "components.training.checks.train_served"
RESULT_FILE = "train_served_gap.json"


class GapJob(Record):
    """What to compare."""

    target: TargetRef
    checkpoint: CheckpointRef
    answers: tuple[ServedAnswer, ...]
    max_tokens: int
    temperature: float = Field(default=0.0, description="that the answers were sampled at: 0 or 1")
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: Literal["cpu", "cuda"] = "cpu"
    num_threads: int | None = None
    output_dir: str


def run_gap(job: GapJob, *, on_line: OnChildLine, timeout_s: float) -> TrainServedGap:
    """As `measure_gap`, in a process of its own, which ends with the caller.

    Raises:
        TrainingError: it failed or took too long; the message ends in its last line.
    """
    folder = Path(job.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).unlink(missing_ok=True)
    path = job.write(folder / "train_served_job.json")
    command = [sys.executable, "-m", MODULE, str(path)]
    run_process(
        command,
        child_environment(),
        what="the train-served comparison",
        on_line=on_line,
        timeout_s=timeout_s,
    )

    return TrainServedGap.read(folder / RESULT_FILE)
