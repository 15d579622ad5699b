"""The trainer process: `python -m components.training.main job.json`.

It opens the hidden-state stream, holds validation states in memory, exports the untrained drafter,
trains, and writes `<output_dir>/result.json` last. SIGTERM ends it after the current step with its
state on disk.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import Accelerator

from components.errors import ConfigError, FingerprintMismatchError, run_main
from components.system.child_lines import ChildLine, tell_parent
from components.training.job import RESULT_FILE, TrainingJob, TrainingResult
from components.training.telemetry import MetricsLog, ProgressTicker
from components.training.trainer_process import TrainerProcess


def main(arguments: list[str] | None = None) -> int:
    """Run the job in the JSON file named on the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        raise ConfigError("usage: python -m components.training.main JOB.json", got=arguments)
    run_job(TrainingJob.read(Path(arguments[0])))
    return 0


def run_job(job: TrainingJob) -> TrainingResult | None:
    """Train as `job` says; the main process returns the result, the others None.

    Raises:
        FingerprintMismatchError: the dataset was written by another target.
        StreamError, StoreError, EngineError: hidden states cannot be had.
        TrainingError: diverged, stopped, or the state cannot be written or read.
        ConfigError: settings that do not fit the target or the data.
    """
    if job.dataset.fingerprint.weights != job.target.fingerprint.weights:
        raise FingerprintMismatchError(
            "the dataset's answers were written by another target",
            got=job.dataset.fingerprint.weights[:12],
            expected=job.target.fingerprint.weights[:12],
            fix="Curate a dataset with this target.",
        )
    if job.num_threads is not None:
        torch.set_num_threads(job.num_threads)

    torch.manual_seed(job.training.seed)
    accelerator = Accelerator(mixed_precision=job.training.mixed_precision)
    with ExitStack() as stack:
        ticker = stack.enter_context(ProgressTicker())
        is_main = accelerator.is_main_process
        tracking = (job.tracking_uri, job.mlflow_run_id) if is_main else (None, None)
        metrics = stack.enter_context(MetricsLog(tracking_uri=tracking[0], run_id=tracking[1]))
        result = TrainerProcess(
            job, accelerator=accelerator, ticker=ticker, metrics=metrics
        ).execute()

    if result is not None:
        result.write(Path(job.output_dir) / RESULT_FILE)
        length = result.checkpoint.expected_acceptance_length
        words = (
            f"{result.num_steps} steps, {result.num_trained_tokens} tokens in"
            f" {result.trainer_s:.0f} s, acceptance {length:.3f}; {result.ended}"
        )
        tell_parent(ChildLine(words))

    return result


if __name__ == "__main__":
    run_main(main)
