"""The training step's probe as its caller sees it: no torch here, for a flow's process starts
without it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Literal

from pydantic import Field

from components.contracts import Record
from components.settings import DrafterSettings, TrainingSettings
from components.system.child import child_environment, run_process
from components.system.child_lines import OnChildLine

MODULE = "components.training.checks.step_probe"
RESULT_FILE = "step_probe.json"


class StepJob(Record):
    """What to time."""

    drafter: DrafterSettings
    training: TrainingSettings
    target_path: str
    aux_layer_ids: tuple[int, ...]
    num_steps: int = Field(ge=1)
    output_dir: str


class StepTimes(Record):
    """What it took."""

    median_s: float
    seconds: tuple[float, ...]
    loop_s: float = Field(description="all steps, the ones before the timed ones included")
    up_s: float = Field(
        default=0.0, description="of the whole process, all but the steps; the caller fills it in"
    )


def run_step_probe(
    job: StepJob,
    *,
    on_line: OnChildLine,
    timeout_s: float,
    device: Literal["cpu", "cuda"] = "cpu",
) -> StepTimes:
    """Time training steps in a process of its own, which ends with the caller.

    Raises:
        TrainingError: it failed or took too long; the message ends in its last line.
    """
    folder = Path(job.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).unlink(missing_ok=True)
    path = job.write(folder / "step_probe_job.json")
    environment = child_environment({"ACCELERATE_USE_CPU": "true"} if device == "cpu" else None)
    started_s = time.monotonic()
    run_process(
        [sys.executable, "-m", MODULE, str(path)],
        environment,
        what="the training step's probe",
        on_line=on_line,
        timeout_s=timeout_s,
    )

    times = StepTimes.read(folder / RESULT_FILE)
    return times.model_copy(update={"up_s": max(0.1, time.monotonic() - started_s - times.loop_s)})
