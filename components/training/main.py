"""The trainer process: `python -m components.training.main job.json`.

It opens the hidden-state stream, holds validation states in memory, exports the untrained drafter, trains, and writes
`<output_dir>/result.json` last. SIGTERM ends it after the current step with its state on disk.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from components.contracts import Calibration, CheckpointRef
from components.drafter.build import build_drafter, load_trainable, read_target_config
from components.drafter.checkpoint import export_checkpoint, load_checkpoint_ref
from components.drafter.start import read_lm_head
from components.drafter.vocabulary import DraftVocabulary, build_draft_vocabulary, from_mappings
from components.errors import CheckpointError, ConfigError, FingerprintMismatchError, run_main
from components.hidden_states.sample import SampleRequest
from components.hidden_states.stream import HiddenStateStream
from components.settings import DrafterSettings
from components.training.calibrate import calibrate, calibration_line, calibration_metrics
from components.training.data import Rows, count_tokens, load_split, requests, training_order
from components.training.engines import wait_for_engines
from components.training.job import RESULT_FILE, TrainingJob, TrainingResult
from components.training.loop import Loop
from components.training.objective import BlockObjective
from components.training.packing import pack_samples
from components.training.state import StateFolder
from components.training.stopping import StopOnSignal
from components.training.telemetry import MetricsLog, ProgressTicker
from components.training.validate import Validation


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
        result = _Run(job, accelerator=accelerator, ticker=ticker, metrics=metrics).execute()
    if result is not None:
        result.write(Path(job.output_dir) / RESULT_FILE)
        print(
            f"trained: {result.num_steps} steps, {result.num_trained_tokens} tokens in {result.trainer_s:.0f} s,"
            f" acceptance {result.checkpoint.expected_acceptance_length:.3f}",
            flush=True,
        )
    return result


def _plain(settings: DrafterSettings) -> DrafterSettings:
    """The same drafter with nothing copied from its target."""
    return settings.model_copy(update={"start": "plain", "start_layers": (), "markov_start": "random"})


class _Run:
    """One job in one process."""

    def __init__(
        self, job: TrainingJob, *, accelerator: Accelerator, ticker: ProgressTicker, metrics: MetricsLog
    ) -> None:
        self._job = job
        self._accelerator = accelerator
        self._ticker = ticker
        self._metrics = metrics
        self._target_path = Path(job.target.path)
        self._output = Path(job.output_dir)
        self._coverage: dict[str, float] = {}
        self._draft_vocab: DraftVocabulary | None = None

    def execute(self) -> TrainingResult | None:
        """All stages of the job, in order."""
        job = self._job
        train_rows, validation_rows = (load_split(job.dataset, split) for split in ("train", "validation"))
        self._ticker.update("building the drafter", now=True)
        drafter = self._build(train_rows, validation_rows)
        states = self._prepare_output()
        untrained = self._export_untrained(drafter)
        order = training_order(train_rows.num_rows, num_epochs=job.training.num_epochs, seed=job.training.seed)
        mine = order[self._accelerator.process_index :: self._accelerator.num_processes]
        state = states.load_newest() if job.resume else None
        self._ticker.update("waiting for the extraction engine", now=True)
        wait_for_engines(job.engine_urls, timeout_s=job.engine_timeout_s)
        with self._open_stream() as stream, StopOnSignal() as stop:
            stream.require_cached(self._all_requests(drafter, train_rows, validation_rows))
            loop = Loop(
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
                loop.restore(state)
            self._ticker.update("waiting for the first hidden states", now=True)
            rest = requests(train_rows, mine, indices=range(loop.progress.num_consumed, len(mine)))
            packs = pack_samples(stream.stream(rest), max_tokens=job.training.tokens_per_step)
            stopped_by = loop.run(stop.guard(packs))
        if untrained is None:
            return None
        calibration = self._calibrate(drafter, validation_rows, step=loop.progress.step)
        return self._result(drafter, untrained, loop, stream.report(), stopped_by, calibration)

    def _all_requests(self, drafter: Any, train_rows: Rows, validation_rows: Rows) -> Iterator[SampleRequest]:
        """Every sample the job reads at some time: what is missing is better known before training than after."""
        num_anchors = max(self._job.training.validation_anchors, self._num_calibration_anchors(drafter))
        num_rows = _rows_holding(validation_rows, num_anchors)
        for rows, number in ((train_rows, train_rows.num_rows), (validation_rows, num_rows)):
            yield from requests(rows, np.arange(rows.num_rows), indices=range(number))

    def _build(self, train_rows: Rows, validation_rows: Rows) -> Any:
        job = self._job
        vocab_size = int(read_target_config(self._target_path).vocab_size)
        parent = load_checkpoint_ref(Path(job.parent.path)) if job.parent else None
        weights = load_file(Path(parent.path) / "model.safetensors") if parent else {}
        self._draft_vocab = self._vocabulary(train_rows, validation_rows, weights, vocab_size)
        drafter = build_drafter(
            _plain(job.drafter) if parent else job.drafter,  # a parent's weights replace whatever the start copies
            target_path=self._target_path,
            aux_layer_ids=job.stream.aux_layer_ids,
            draft_vocab=self._draft_vocab,
            seed=job.training.seed,
        )
        if parent is not None:
            load_trainable(drafter, weights, source=f"the parent checkpoint {parent.path}")
        return drafter

    def _export_untrained(self, drafter: Any) -> CheckpointRef | None:
        """What training is compared with: the parent as it was, or this drafter with nothing learned or copied.

        A start from the target's own layers and bigrams is part of what the recipe does for acceptance, so it belongs
        to the trained side; the validation at step 0 says what it is worth alone.
        """
        settings = self._job.drafter
        if self._job.parent is None and settings != _plain(settings):
            drafter = build_drafter(
                _plain(settings),
                target_path=self._target_path,
                aux_layer_ids=self._job.stream.aux_layer_ids,
                draft_vocab=self._draft_vocab,
                seed=self._job.training.seed,
            )
        return self._export(drafter, "untrained", step=0, num_tokens=0, acceptance=None, extra={})

    def _vocabulary(
        self, train_rows: Rows, validation_rows: Rows, parent: dict[str, torch.Tensor], vocab_size: int
    ) -> DraftVocabulary | None:
        """The parent's vocabulary where there is one, because its weights are indexed by it; else by frequency."""
        size = self._job.drafter.draft_vocab_size
        if size is None or size >= vocab_size:
            return None
        counts = {
            split: [torch.from_numpy(counts_V) for counts_V in count_tokens(rows, vocab_size=vocab_size)]
            for split, rows in (("train", train_rows), ("validation", validation_rows))
        }
        if self._job.parent is None:
            vocabulary = build_draft_vocabulary(
                counts["train"][0],
                size=size,
                min_coverage=self._job.drafter.min_vocab_coverage,
                context_counts_V=counts["train"][1],
            )
        elif "d2t" in parent and "t2d" in parent:
            vocabulary = from_mappings(parent["d2t"], parent["t2d"])
        else:
            raise CheckpointError("the parent checkpoint has no draft vocabulary", got=self._job.parent.path)
        self._coverage = {
            split: vocabulary.measure_coverage(supervised_V) for split, (supervised_V, _) in counts.items()
        }
        shares = ", ".join(f"{split} {share:.4f}" for split, share in self._coverage.items())
        self._ticker.update(f"draft vocabulary of {vocabulary.size} tokens covers {shares}", now=True)
        return vocabulary

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
        # The stream reports once a second; its own clock in milliseconds keeps points apart where steps are slower.
        self._metrics.log({f"stream/{name}": value for name, value in values.items()}, step=int(time.monotonic()))

    def _validation(self, stream: HiddenStateStream, rows: Rows, drafter: Any) -> Validation | None:
        if not self._accelerator.is_main_process:
            return None
        settings = self._job.training
        num_rows = _rows_holding(rows, settings.validation_anchors)
        self._ticker.update(f"reading {num_rows} validation conversations", now=True)
        samples = stream.stream(requests(rows, np.arange(rows.num_rows), indices=range(num_rows)))
        return Validation(
            list(pack_samples(samples, max_tokens=settings.tokens_per_step)),
            max_anchors=settings.validation_anchors,
            lm_head_VH=self._lm_head(),
            drafter=drafter.to(self._accelerator.device),
            num_draft_tokens=self._job.drafter.block_size - 1,
            slices=dict(zip(rows["conversation_id"].to_pylist(), rows["source"].to_pylist(), strict=True)),
        )

    def _lm_head(self) -> torch.Tensor:
        """The target's full output head, on the device, in the dtype of the matrix products."""
        dtype = torch.bfloat16 if self._job.training.mixed_precision == "bf16" else torch.float32
        return read_lm_head(self._target_path).to(self._accelerator.device, dtype)

    def _calibrate(self, drafter: Any, rows: Rows, *, step: int) -> Calibration | None:
        """Calibrate the trained drafter's confidence head on the validation split; None where it has no such head.

        The states come over a stream of their own: training may have left its own in the middle.
        """
        settings, num_anchors = self._job.training, self._num_calibration_anchors(drafter)
        if not num_anchors:
            return None
        num_rows = _rows_holding(rows, num_anchors)
        self._ticker.update(f"calibrating the confidence head on {num_rows} held-out conversations", now=True)
        with self._open_stream() as stream, StopOnSignal(), self._accelerator.autocast():
            samples = stream.stream(requests(rows, np.arange(rows.num_rows), indices=range(num_rows)))
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

    def _num_calibration_anchors(self, drafter: Any) -> int:
        has_head = getattr(drafter, "confidence_head", None) is not None
        return self._job.training.calibration_anchors if has_head else 0

    def _export(
        self,
        drafter: Any,
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
        drafter: Any,
        untrained: CheckpointRef,
        loop: Loop,
        stream: Any,
        stopped_by: str,
        calibration: Calibration | None,
    ) -> TrainingResult:
        progress = loop.progress
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
        )


def _rows_holding(rows: Rows, num_supervised: int) -> int:
    """How many rows, from the first, hold `num_supervised` supervised tokens; all where there are fewer."""
    held = 0
    for position in range(rows.num_rows):
        held += int(rows.column("loss_mask")[position].values.to_numpy(zero_copy_only=False).sum())
        if held >= num_supervised:
            return position + 1
    return int(rows.num_rows)


if __name__ == "__main__":
    run_main(main)
