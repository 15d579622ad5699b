"""The training loop: packs in, steps, validation by acceptance, complete states on disk.

Device agnostic through `accelerate`; with several processes each reads its own share of the samples
and gradients are averaged (`parallel.py`). One call of `Trainer.run` is one run, from a fresh start
or from a state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from components.drafter.build import num_draft_tokens, trainable_state
from components.drafter.protocol import Drafter
from components.errors import TrainingError
from components.settings import TrainingSettings
from components.training.checks.acceptance import AcceptanceCheck
from components.training.curve import TrainingProgress, Window
from components.training.job import CurvePoint
from components.training.objectives.block import BlockScores
from components.training.optimizing.learning_rate import LearningRateSchedule
from components.training.optimizing.parallel import prepare
from components.training.packing import Pack, choose_blocks, has_blocks
from components.training.state import StateFolder
from components.training.telemetry import MetricsLog, ProgressTicker


class TrainingStoppedError(TrainingError):
    """The run was told to stop; its state is on disk."""


@dataclass
class _Group:
    """Packs of one step. The counts include packs without a block, which are not among `packs`."""

    packs: list[Pack] = field(default_factory=list)
    num_samples: int = 0
    num_tokens: int = 0


class Trainer:
    """One training run.

    Args:
        drafter: of `build_drafter`.
        settings: the recipe's section.
        accelerator: device, precision and processes.
        num_samples: samples this process will be given over the whole run.
        validation: held-out packs; None only where the process is not the main one.
        states: where states go.
        ticker: progress lines.
        metrics: live metrics.
        should_stop: asked before every step; True ends the run with its state on disk.
    """

    def __init__(
        self,
        drafter: Drafter,
        settings: TrainingSettings,
        *,
        accelerator: Accelerator,
        num_samples: int,
        validation: AcceptanceCheck | None,
        states: StateFolder,
        ticker: ProgressTicker,
        metrics: MetricsLog,
        should_stop: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._accelerator = accelerator
        self._drafter = drafter
        self._trainee = prepare(drafter, settings, accelerator)
        self._schedule = LearningRateSchedule(
            learning_rate=settings.learning_rate,
            warmup_share=settings.warmup_share,
            num_samples=num_samples,
            num_steps=settings.num_steps,
            max_trainer_s=settings.max_trainer_s,
        )

        self._generator = torch.Generator().manual_seed(
            settings.seed * 1000 + accelerator.process_index
        )
        self._num_draft_tokens = num_draft_tokens(drafter)
        self._validation = validation
        self._states = states
        self._ticker = ticker

        self._metrics = metrics
        self._should_stop = should_stop
        self._has_stalled = False
        self._num_samples = num_samples
        self.progress = TrainingProgress()

    @property
    def num_planned_steps(self) -> int | None:
        """Steps that all samples would take, at the rate so far; None before the first."""
        progress, settings = self.progress, self._settings
        if not progress.num_consumed:
            return None
        by_data = round(progress.step * self._num_samples / progress.num_consumed)
        return min(by_data, settings.num_steps or by_data)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state of `StateFolder`.

        Raises:
            TrainingError: it was written by another number of processes, or with another optimizer
                or sharding.
        """
        ranks = state["ranks"]
        if len(ranks) != self._accelerator.num_processes:
            raise TrainingError(
                "the state is of another number of processes",
                got=len(ranks),
                expected=self._accelerator.num_processes,
            )
        if state.get("parallel", "ddp") != self._settings.parallel:
            raise TrainingError(
                "the state is of another way to share the work between processes",
                got=state.get("parallel", "ddp"),
                expected=self._settings.parallel,
                fix="Resume with the training.parallel it was started with, or start anew.",
            )
        if len(state.get("optimizers", ())) != len(self._trainee.optimizers):
            raise TrainingError(
                "the state is of another optimizer",
                expected=self._settings.optimizer,
                fix="Resume with the training.optimizer it was started with, or start anew.",
            )

        self._trainee.load(state["weights"], source="the training state")
        self._trainee.load_optimizer_states(state["optimizers"])
        mine = ranks[self._accelerator.process_index]
        self._generator.set_state(mine["generator"])
        self.progress = TrainingProgress.load(state["progress"])
        self.progress.num_consumed = int(mine["num_consumed"])

    def run(self, packs: Iterator[Pack]) -> str:
        """Train until data, steps or time end; the weights of longest acceptance are in the drafter
        afterwards.

        Returns:
            What ended the run: 'data', 'steps', 'time' or 'acceptance' (it no longer grew).

        Raises:
            TrainingStoppedError: `should_stop` said so; the state is saved.
            TrainingError: the loss or the gradients are not finite; the samples of the step are
                named.
        """
        settings, progress = self._settings, self.progress
        started = time.monotonic() - progress.elapsed_s
        if progress.step == 0:
            self._validate()

        window = Window(progress.elapsed_s, progress.wait_s)
        while True:
            progress.elapsed_s = time.monotonic() - started
            stopped_by = self._schedule.stopped_by(step=progress.step, elapsed_s=progress.elapsed_s)
            if stopped_by is None and self._has_stalled:
                stopped_by = "acceptance"
            group = _Group() if stopped_by else self._next(packs)
            progress.elapsed_s = time.monotonic() - started
            if self._anyone_stops():
                self._save()
                raise TrainingStoppedError(
                    "training was told to stop",
                    got=f"step {progress.step}, state saved",
                    fix="Run the job with resume to continue.",
                )
            if not self._everyone_has(group.packs):
                break
            first_step = progress.step
            for _ in range(settings.updates_per_pack):
                self._step(group.packs, window)
                progress.elapsed_s = time.monotonic() - started
                if progress.step % settings.log_every_steps == 0:
                    window = self._log(window)
                if progress.step % settings.validate_every_steps == 0:
                    self._validate()
            progress.num_consumed += group.num_samples
            progress.num_tokens += group.num_tokens * self._accelerator.num_processes
            # Between groups only: a resumed run then continues at a place in the stream.
            if (
                progress.step // settings.checkpoint_every_steps
                > first_step // settings.checkpoint_every_steps
            ):
                self._save()

        if window.num_steps:
            self._log(window)
        self._finish()
        progress.elapsed_s = time.monotonic() - started
        return stopped_by or "data"

    def _next(self, packs: Iterator[Pack]) -> _Group:
        """The packs of the next step: fewer where the data end, none at their end.

        Packs without a block are passed over here, because a process that skipped a step would
        leave the others waiting for its gradients.
        """
        waiting = time.monotonic()
        group = _Group()
        for pack in packs:
            group.num_samples += len(pack.indices)
            group.num_tokens += pack.num_tokens
            if has_blocks(pack, in_prompts=self._settings.blocks_in_prompts):
                group.packs.append(pack)
            if len(group.packs) == self._settings.packs_per_step:
                break
        self.progress.wait_s += time.monotonic() - waiting
        return group

    def _step(self, group: list[Pack], window: Window) -> None:
        progress, settings = self.progress, self._settings
        share = self._schedule.share_done(
            step=progress.step, num_consumed=progress.num_consumed, elapsed_s=progress.elapsed_s
        )
        self._trainee.optimizers.set_learning_rate(self._schedule.rate(share))
        progress.step += 1
        scored = [
            self._backward(pack, share=1 / len(group), is_last=pack is group[-1]) for pack in group
        ]

        norm = self._trainee.clip(settings.max_grad_norm)
        if not (
            all(bool(torch.isfinite(scores.loss)) for scores in scored) and torch.isfinite(norm)
        ):
            self._refuse_divergence(group, scored, norm=float(norm))

        self._trainee.optimizers.step()
        window.add(scored, float(norm))
        self._ticker.update(self._words(window), percent=100 * self._share_done())

    def _backward(self, pack: Pack, *, share: float, is_last: bool) -> BlockScores:
        """Add the gradients of `share` times a pack's loss."""
        settings = self._settings
        pack = pack.to(self._accelerator.device)
        blocks = choose_blocks(
            pack,
            num_draft_tokens=self._num_draft_tokens,
            num_anchors=settings.anchors_per_step,
            generator=self._generator,
            in_prompts=settings.blocks_in_prompts,
        )

        assert blocks is not None  # `_next` passed over such packs
        # Processes average their gradients once a step.
        with nullcontext() if is_last else self._trainee.accumulate():
            with self._accelerator.autocast():
                scores: BlockScores = self._trainee.objective(pack, blocks)
            self._accelerator.backward(scores.loss * share)

        return replace(scores, loss=scores.loss.detach())

    def _refuse_divergence(
        self, group: list[Pack], scored: list[BlockScores], *, norm: float
    ) -> None:
        """Save the packs for a look, then end the run.

        Raises:
            TrainingError: always.
        """
        step = self.progress.step
        path = self._states.save_batch([vars(pack) for pack in group], step=step)
        raise TrainingError(
            f"training diverged at step {step}",
            got=f"losses {[round(float(scores.loss), 4) for scores in scored if scores]}, "
            f"gradient norm {norm:.4g},"
            f" samples {[name for pack in group for name in pack.sample_ids]}",
            fix=f"Lower training.learning_rate, or look at these samples: {path}",
        )

    def _share_done(self) -> float:
        progress = self.progress
        return self._schedule.share_done(
            step=progress.step, num_consumed=progress.num_consumed, elapsed_s=progress.elapsed_s
        )

    def _words(self, window: Window) -> str:
        progress = self.progress
        best = f" best {progress.best_acceptance:.3f}" if progress.best_acceptance else ""
        return (
            f"step {progress.step} loss {window.loss / window.num_steps:.3f}"
            f" acceptance {window.accepted / window.num_steps:.3f}{best}"
            f" {progress.num_tokens / max(progress.elapsed_s, 1e-9):,.0f} tok/s"
            f" waiting {100 * progress.wait_s / max(progress.elapsed_s, 1e-9):.0f} %"
        )

    def _log(self, window: Window) -> Window:
        progress = self.progress
        if window.num_steps:
            loss, accepted, expected = self._mean_over_processes(
                window.loss, window.accepted, window.expected
            )
            span_s = max(progress.elapsed_s - window.started_s, 1e-9)
            point = CurvePoint(
                step=progress.step,
                elapsed_s=progress.elapsed_s,
                num_tokens=progress.num_tokens,
                loss=loss / window.num_steps,
                acceptance_length=accepted / window.num_steps,
                expected_acceptance_length=expected / window.num_steps,
                learning_rate=self._trainee.optimizers.learning_rate,
                grad_norm=window.grad_norm / window.num_steps,
                wait_share=min(1.0, (progress.wait_s - window.waited_s) / span_s),
            )
            progress.curve.append(point)
            values = point.model_dump(exclude={"step"})
            self._metrics.log(
                {f"train/{name}": value for name, value in values.items()}, step=progress.step
            )

        return Window(progress.elapsed_s, progress.wait_s)

    def _mean_over_processes(self, *values: float) -> list[float]:
        if self._accelerator.num_processes == 1:
            return list(values)
        mine = torch.tensor(values, dtype=torch.float64, device=self._accelerator.device)
        means: list[float] = self._accelerator.reduce(mine, reduction="mean").tolist()
        return means

    def _validate(self) -> None:
        """Measure acceptance and keep the weights if they are the best so far."""
        progress = self.progress
        if (
            progress.validation
            and progress.validation[-1].step == progress.step
            and progress.step > 0
        ):
            return

        self._trainee.gather()
        if self._validation is not None:
            with self._accelerator.autocast():
                point = self._validation.measure(
                    self._trainee.validator(), step=progress.step, elapsed_s=progress.elapsed_s
                )
            progress.validation.append(point)
            values = {
                name: value
                for name, value in point.model_dump(exclude={"step"}).items()
                if not _is_nested(value)
            }
            for position, share in enumerate(point.acceptance_by_position, 1):
                values[f"acceptance_position_{position}"] = share
            for name, length in point.acceptance_by_slice.items():
                values[f"acceptance_{name}"] = length
            self._metrics.log(
                {f"validation/{name}": value for name, value in values.items()}, step=progress.step
            )
            self._ticker.update(
                f"validation at step {progress.step}: acceptance {point.acceptance_length:.3f}"
                f" (walked {point.walked_acceptance_length:.3f}, expected "
                f"{point.expected_acceptance_length:.3f})",
                now=True,
            )
            if point.acceptance_length >= progress.best_acceptance:
                progress.best_acceptance = point.acceptance_length
                self._states.save_best(trainable_state(self._drafter))

        self._has_stalled = bool(max(gather_object([self._stalls()])))
        self._accelerator.wait_for_everyone()

    def _stalls(self) -> bool:
        """Whether the last validations, as many as the recipe allows, all fell short of the best
        before them.
        """
        patience, points = self._settings.early_stop_validations, self.progress.validation
        if patience is None or len(points) <= patience:
            return False
        lengths = [point.acceptance_length for point in points]
        return max(lengths[-patience:]) <= max(lengths[:-patience])

    def _save(self) -> None:
        ranks = gather_object(
            [{"generator": self._generator.get_state(), "num_consumed": self.progress.num_consumed}]
        )
        self._trainee.gather()
        optimizers = self._trainee.optimizer_states()

        if self._accelerator.is_main_process:
            state = {
                "weights": trainable_state(self._drafter),
                "optimizers": optimizers,
                "parallel": self._settings.parallel,
                "ranks": ranks,
                "progress": self.progress.dump(),
            }
            self._states.save(state, step=self.progress.step)

        self._accelerator.wait_for_everyone()

    def _finish(self) -> None:
        self._validate()
        self._save()
        best = self._states.load_best()
        if best is not None:
            self._trainee.load(best, source="the best weights")

    def _everyone_has(self, packs: list[Pack]) -> bool:
        """Processes step together: the first to run out of packs ends the run for all."""
        if self._accelerator.num_processes == 1:
            return bool(packs)
        return bool(min(gather_object([bool(packs)])))

    def _anyone_stops(self) -> bool:
        if self._accelerator.num_processes == 1:
            return self._should_stop()
        return bool(max(gather_object([self._should_stop()])))


def _is_nested(value: object) -> bool:
    return value is None or isinstance(value, (tuple, list, dict))
