"""One training job, from its rows to the exported checkpoint, in one process of possibly
several.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from components.contracts import Calibration, CheckpointRef
from components.drafter.build import read_target_config
from components.drafter.checkpoint import export_checkpoint
from components.drafter.protocol import Drafter
from components.drafter.start import read_lm_head
from components.hidden_states.sample import SampleRequest
from components.hidden_states.stream import HiddenStateStream
from components.training.checks.acceptance import AcceptanceCheck
from components.training.checks.calibrate import calibrate, calibration_line, calibration_metrics
from components.training.data import Rows, load_split, requests, training_order
from components.training.drafter import JobDrafter
from components.training.engines import wait_for_engines
from components.training.job import RESULT_FILE, TrainingJob, TrainingResult
from components.training.objectives.block import BlockObjective
from components.training.packing import pack_samples
from components.training.state import StateFolder
from components.training.stopping import StopOnSignal
from components.training.telemetry import MetricsLog, ProgressTicker
from components.training.trainer import Trainer


class TrainerProcess:
    """One job in one process.

    Args:
        job: what to train on what.
        accelerator: device, precision and processes.
        ticker: progress lines.
        metrics: live metrics.
    """

    def __init__(
        self,
        job: TrainingJob,
        *,
        accelerator: Accelerator,
        ticker: ProgressTicker,
        metrics: MetricsLog,
    ) -> None:
        self._job = job
        self._accelerator = accelerator
        self._ticker = ticker
        self._metrics = metrics
        self._target_path = Path(job.target.path)
        self._output = Path(job.output_dir)
        self._coverage: dict[str, float] = {}

    def execute(self) -> TrainingResult | None:
        """All stages of the job, in order."""
        job = self._job
        train_rows, validation_rows = (
            load_split(job.dataset, split) for split in ("train", "validation")
        )
        self._ticker.update("building the drafter", now=True)
        built = JobDrafter.build(job, train_rows=train_rows, validation_rows=validation_rows)
        drafter = built.model

        self._tell_coverage(built)
        states = self._prepare_output()
        untrained = self._export(
            built.untrained(), "untrained", step=0, num_tokens=0, acceptance=None, extra={}
        )
        order = training_order(
            train_rows.num_rows, num_epochs=job.training.num_epochs, seed=job.training.seed
        )

        mine = order[self._accelerator.process_index :: self._accelerator.num_processes]
        state = states.load_newest() if job.resume else None
        self._ticker.update("waiting for the extraction engine", now=True)
        wait_for_engines(job.engine_urls, timeout_s=job.engine_timeout_s)

        with self._open_stream() as stream, StopOnSignal() as stop:
            stream.require_cached(self._all_requests(drafter, train_rows, validation_rows))
            trainer = Trainer(
                drafter,
                job.training,
                accelerator=self._accelerator,
                num_samples=len(mine),
                validation=self._validation(stream, validation_rows, drafter),
                states=states,
                ticker=self._ticker,
                metrics=self._metrics,
                should_stop=lambda: stop.requested,
            )
            if state is not None:
                trainer.restore(state)
            self._ticker.update("waiting for the first hidden states", now=True)
            rest = requests(
                train_rows, mine, indices=range(trainer.progress.num_consumed, len(mine))
            )
            packs = pack_samples(stream.stream(rest), max_tokens=job.training.tokens_per_step)
            stopped_by = trainer.run(stop.guard(packs))

        if untrained is None:
            return None
        calibration = self._calibrate(drafter, validation_rows, step=trainer.progress.step)
        return self._result(drafter, untrained, trainer, stream.report(), stopped_by, calibration)

    def _all_requests(
        self, drafter: Drafter, train_rows: Rows, validation_rows: Rows
    ) -> Iterator[SampleRequest]:
        """Every sample the job reads at some time: what is missing is better known before training
        than after.
        """
        num_anchors = max(
            self._job.training.validation_anchors, self._num_calibration_anchors(drafter)
        )
        num_rows = _rows_holding(validation_rows, num_anchors)
        for rows, number in ((train_rows, train_rows.num_rows), (validation_rows, num_rows)):
            yield from requests(rows, np.arange(rows.num_rows), indices=range(number))

    def _tell_coverage(self, built: JobDrafter) -> None:
        self._coverage = built.coverage
        if built.vocabulary is not None:
            shares = ", ".join(f"{split} {share:.4f}" for split, share in built.coverage.items())
            self._ticker.update(
                f"draft vocabulary of {built.vocabulary.size} tokens covers {shares}", now=True
            )

    def _prepare_output(self) -> StateFolder:
        states = StateFolder(self._output / "state", keep=self._job.training.keep_checkpoints)
        if self._accelerator.is_main_process:
            self._output.mkdir(parents=True, exist_ok=True)
            (self._output / RESULT_FILE).unlink(missing_ok=True)
            if not self._job.resume:
                states.clear()
                shutil.rmtree(self._output / "checkpoint", ignore_errors=True)
        self._accelerator.wait_for_everyone()
        return states

    def _open_stream(self) -> HiddenStateStream:
        job = self._job
        config = read_target_config(self._target_path)
        return HiddenStateStream(
            job.stream,
            engine_urls=job.engine_urls,
            model=job.model,
            store=job.store,
            run_id=job.stream_run_id,
            fingerprint=job.target.fingerprint,
            num_hidden_layers=int(config.num_hidden_layers),
            hidden_size=int(config.hidden_size),
            target_path=self._target_path,
            on_metrics=self._log_stream,
            consumer=str(self._accelerator.process_index),
        )

    def _log_stream(self, values: dict[str, float]) -> None:
        # The stream reports once a second; its own clock in milliseconds keeps points apart where
        # steps are slower.
        self._metrics.log(
            {f"stream/{name}": value for name, value in values.items()}, step=int(time.monotonic())
        )

    def _validation(
        self, stream: HiddenStateStream, rows: Rows, drafter: Drafter
    ) -> AcceptanceCheck | None:
        if not self._accelerator.is_main_process:
            return None
        settings = self._job.training
        num_rows = _rows_holding(rows, settings.validation_anchors)
        self._ticker.update(f"reading {num_rows} validation conversations", now=True)
        samples = stream.stream(requests(rows, np.arange(rows.num_rows), indices=range(num_rows)))

        return AcceptanceCheck(
            list(pack_samples(samples, max_tokens=settings.tokens_per_step)),
            max_anchors=settings.validation_anchors,
            lm_head_VH=self._lm_head(),
            drafter=drafter.to(self._accelerator.device),
            num_draft_tokens=self._job.drafter.block_size - 1,
            slices=dict(
                zip(rows["conversation_id"].to_pylist(), rows["source"].to_pylist(), strict=True)
            ),
        )

    def _lm_head(self) -> torch.Tensor:
        """The target's full output head, on the device, in the dtype of the matrix products."""
        dtype = torch.bfloat16 if self._job.training.mixed_precision == "bf16" else torch.float32
        return read_lm_head(self._target_path).to(self._accelerator.device, dtype)

    def _calibrate(self, drafter: Drafter, rows: Rows, *, step: int) -> Calibration | None:
        """Calibrate the trained drafter's confidence head on the validation split; None where it
        has no such head.

        The states come over a stream of their own: training may have left its own in the middle.
        """
        settings = self._job.training
        num_anchors = self._num_calibration_anchors(drafter)
        if not num_anchors:
            return None

        num_rows = _rows_holding(rows, num_anchors)
        self._ticker.update(
            f"calibrating the confidence head on {num_rows} held-out conversations", now=True
        )

        with self._open_stream() as stream, StopOnSignal(), self._accelerator.autocast():
            samples = stream.stream(
                requests(rows, np.arange(rows.num_rows), indices=range(num_rows))
            )
            calibration = calibrate(
                BlockObjective(drafter, settings),
                pack_samples(samples, max_tokens=settings.tokens_per_step),
                lm_head_VH=self._lm_head(),
                num_draft_tokens=self._job.drafter.block_size - 1,
                target_weights=self._job.target.fingerprint.weights,
            )

        if calibration is not None:
            self._metrics.log(calibration_metrics(calibration), step=step)
            self._ticker.update(calibration_line(calibration), now=True)
        return calibration

    def _num_calibration_anchors(self, drafter: Drafter) -> int:
        has_head = getattr(drafter, "confidence_head", None) is not None
        return self._job.training.calibration_anchors if has_head else 0

    def _export(
        self,
        drafter: Drafter,
        name: str,
        *,
        step: int,
        num_tokens: int,
        acceptance: float | None,
        extra: dict[str, Any],
        calibration: Calibration | None = None,
    ) -> CheckpointRef | None:
        if not self._accelerator.is_main_process:
            return None
        job = self._job
        return export_checkpoint(
            drafter,
            self._output / name,
            target=job.target,
            settings=job.drafter,
            dataset_digest=job.dataset.digest,
            step=step,
            num_trained_tokens=num_tokens,
            parent_digest=job.parent.digest if job.parent else None,
            expected_acceptance_length=acceptance,
            extra={
                "training": job.training.model_dump(mode="json"),
                "stream": job.stream.model_dump(mode="json"),
                "draft_vocab_coverage": self._coverage,
                **extra,
            },
            calibration=calibration,
        )

    def _result(
        self,
        drafter: Drafter,
        untrained: CheckpointRef,
        trainer: Trainer,
        stream: Any,
        stopped_by: str,
        calibration: Calibration | None,
    ) -> TrainingResult:
        progress = trainer.progress
        best = max(progress.validation, key=lambda point: (point.acceptance_length, point.step))
        checkpoint = self._export(
            drafter,
            "checkpoint",
            step=best.step,
            num_tokens=progress.num_tokens,
            acceptance=best.acceptance_length,
            extra={"validation": best.model_dump(mode="json"), "num_steps": progress.step},
            calibration=calibration,
        )

        assert checkpoint is not None
        return TrainingResult(
            checkpoint=checkpoint,
            untrained=untrained,
            stream=stream,
            curve=tuple(progress.curve),
            validation=tuple(progress.validation),
            num_steps=progress.step,
            num_trained_tokens=progress.num_tokens,
            trainer_s=progress.elapsed_s,
            wait_s=progress.wait_s,
            draft_vocab_coverage=self._coverage,
            calibration=calibration,
            stopped_by=stopped_by,
            num_planned_steps=trainer.num_planned_steps if stopped_by == "time" else None,
        )


def _rows_holding(rows: Rows, num_supervised: int) -> int:
    """How many rows, from the first, hold `num_supervised` supervised tokens; all where there are
    fewer.
    """
    held = 0
    for position in range(rows.num_rows):
        held += int(rows.column("loss_mask")[position].values.to_numpy(zero_copy_only=False).sum())
        if held >= num_supervised:
            return position + 1
    return int(rows.num_rows)
