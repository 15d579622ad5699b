"""The loop on a tiny drafter: it learns, resumes exactly, stops cleanly, and refuses to go on with
NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from components.drafter.build import trainable_state
from components.drafter.start import read_lm_head
from components.errors import TrainingError
from components.settings import TrainingSettings
from components.training.checks.acceptance import AcceptanceCheck
from components.training.job import TrainingResult, ValidationPoint
from components.training.packing import Pack
from components.training.state import StateFolder
from components.training.telemetry import MetricsLog, ProgressTicker
from components.training.trainer import Trainer, TrainingStoppedError

SETTINGS = TrainingSettings(
    learning_rate=3e-3,
    tokens_per_step=96,
    anchors_per_step=16,
    mixed_precision="no",
    log_every_steps=1,
    validate_every_steps=1000,
    checkpoint_every_steps=4,
    keep_checkpoints=9,
)


def make_loop(
    drafter: Any,
    packs: list[Pack],
    folder: Path,
    target: Path,
    settings: TrainingSettings = SETTINGS,
    should_stop: Callable[[], bool] = lambda: False,
) -> Trainer:
    validation = AcceptanceCheck(
        packs[:2],
        max_anchors=64,
        lm_head_VH=read_lm_head(target).float(),
        drafter=drafter,
        num_draft_tokens=3,
    )
    return Trainer(
        drafter,
        settings,
        accelerator=Accelerator(mixed_precision="no", cpu=True),
        num_samples=sum(len(pack.indices) for pack in packs),
        validation=validation,
        states=StateFolder(folder, keep=settings.keep_checkpoints),
        ticker=ProgressTicker(),
        metrics=MetricsLog(tracking_uri=None, run_id=None),
        should_stop=should_stop,
    )


@pytest.mark.parametrize("algorithm", ["dspark", "eagle3"])
def test_it_learns_and_hands_back_the_best_weights(
    make_drafter: Callable[..., Any],
    packs: list[Pack],
    tmp_path: Path,
    tiny_target: Path,
    algorithm: str,
) -> None:
    drafter = make_drafter(algorithm=algorithm)
    loop = make_loop(drafter, packs * 6, tmp_path, tiny_target)
    assert loop.run(iter(packs * 6)) == "data"
    progress = loop.progress
    assert progress.curve[-1].loss < 0.7 * progress.curve[0].loss
    assert [point.step for point in progress.validation] == [0, progress.step]
    assert progress.best_acceptance == max(point.acceptance_length for point in progress.validation)
    assert progress.num_tokens == 6 * sum(pack.num_tokens for pack in packs)
    best = StateFolder(tmp_path, keep=1).load_best()
    assert best is not None
    assert all(torch.equal(value, best[name]) for name, value in trainable_state(drafter).items())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_has_the_losses_of_the_undisturbed_one(
    make_drafter: Callable[..., Any],
    packs: list[Pack],
    tmp_path: Path,
    tiny_target: Path,
    optimizer: str,
) -> None:
    settings = SETTINGS.model_copy(update={"optimizer": optimizer})
    whole = make_loop(make_drafter(), packs, tmp_path / "whole", tiny_target, settings)
    whole.run(iter(packs))
    asked = iter(range(100))
    stopped = make_loop(
        make_drafter(),
        packs,
        tmp_path / "cut",
        tiny_target,
        settings,
        should_stop=lambda: next(asked) >= 3,
    )
    with pytest.raises(TrainingStoppedError, match="step 3, state saved"):
        stopped.run(iter(packs))
    resumed = make_loop(make_drafter(seed=9), packs, tmp_path / "cut", tiny_target, settings)
    state = StateFolder(tmp_path / "cut", keep=2).load_newest()
    assert state is not None
    resumed.restore(state)
    assert resumed.progress.num_consumed == sum(len(pack.indices) for pack in packs[:3])
    resumed.run(iter(packs[3:]))
    losses = [[point.loss for point in loop.progress.curve] for loop in (whole, resumed)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) and len(losses[0]) == len(packs)


def test_steps_and_time_end_a_run(
    make_drafter: Callable[..., Any], packs: list[Pack], tmp_path: Path, tiny_target: Path
) -> None:
    two_steps = SETTINGS.model_copy(update={"num_steps": 2})
    loop = make_loop(make_drafter(), packs, tmp_path / "steps", tiny_target, two_steps)
    assert loop.run(iter(packs)) == "steps" and loop.progress.step == 2
    no_time = SETTINGS.model_copy(update={"max_trainer_s": 1e-6})
    loop = make_loop(make_drafter(), packs, tmp_path / "time", tiny_target, no_time)
    assert loop.run(iter(packs)) == "time" and loop.progress.step == 0
    assert loop.num_planned_steps is None  # nothing to go by


def test_what_all_data_would_have_taken_is_told_from_what_a_part_took(
    make_drafter: Callable[..., Any], packs: list[Pack], tmp_path: Path, tiny_target: Path
) -> None:
    loop = make_loop(make_drafter(), packs, tmp_path, tiny_target, SETTINGS)
    assert loop.run(iter(packs)) == "data"
    num_steps, num_samples = loop.progress.step, loop.progress.num_consumed
    loop.progress.step, loop.progress.num_consumed = num_steps // 2, num_samples // 2
    loop._num_samples = num_samples
    assert loop.num_planned_steps == pytest.approx(num_steps, abs=1)


@pytest.mark.parametrize(
    ("stopped_by", "planned", "said"),
    [
        ("time", 400, "cut short at step 120 of about 400 by training.max_trainer_s"),
        ("data", None, "ended with its data at step 120"),
        ("steps", None, "ended by training.num_steps at step 120"),
        ("acceptance", None, "ended because acceptance no longer grew at step 120"),
    ],
)
def test_a_result_says_where_training_ended_and_by_what(
    stopped_by: str, planned: int | None, said: str
) -> None:
    result = TrainingResult.model_construct(
        stopped_by=stopped_by, num_steps=120, num_planned_steps=planned
    )
    assert result.ended == said


@pytest.mark.parametrize(
    ("lengths", "patience", "stalls"),
    [
        ([1.0, 1.2, 1.3], 2, False),
        ([1.0, 1.3, 1.2, 1.25], 2, True),
        ([1.0, 1.3, 1.2, 1.31], 2, False),
        ([1.3, 1.3, 1.3], 2, True),  # as long is not longer
        ([1.3, 1.2], 2, False),  # too early to tell
        ([1.3, 1.2, 1.1, 1.0], None, False),
    ],
)
def test_a_run_whose_acceptance_no_longer_grows_ends(
    make_drafter: Callable[..., Any], packs: list[Pack], tmp_path: Path, tiny_target: Path,
    lengths: list[float], patience: int | None, stalls: bool,
) -> None:  # fmt: skip
    settings = SETTINGS.model_copy(
        update={"early_stop_validations": patience, "validate_every_steps": 1}
    )
    loop = make_loop(make_drafter(), packs, tmp_path, tiny_target, settings)
    points = iter(lengths)

    def measured(objective: object, *, step: int, elapsed_s: float) -> ValidationPoint:
        return ValidationPoint(
            step=step,
            elapsed_s=elapsed_s,
            acceptance_length=next(points, 9.0 + step),
            acceptance_interval=(0, 0),
            walked_acceptance_length=1.0,
            expected_acceptance_length=1.0,
            acceptance_by_position=(0.1, 0.1, 0.1),
            loss=1.0,
            num_anchors=1,
        )

    loop._validation.measure = measured  # type: ignore[union-attr, method-assign]
    assert loop.run(iter(packs)) == ("acceptance" if stalls else "data")
    if stalls:
        assert loop.progress.step == len(lengths) - 1


def test_a_loss_that_is_not_finite_stops_with_the_samples_named(
    make_drafter: Callable[..., Any], packs: list[Pack], tmp_path: Path, tiny_target: Path
) -> None:
    drafter = make_drafter()
    loop = make_loop(drafter, packs, tmp_path, tiny_target)
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("nan")
    loop.progress.step = 1  # past the validation of the start
    with pytest.raises(TrainingError, match=r"diverged at step 2.*sample-0.*diverged-00000002\.pt"):
        loop.run(iter(packs))
    (saved,) = torch.load(tmp_path / "diverged-00000002.pt", weights_only=True)
    assert saved["sample_ids"] == packs[0].sample_ids and torch.equal(
        saved["states_TLH"], packs[0].states_TLH
    )


def test_accumulated_gradients_are_the_mean_over_packs(
    make_drafter: Callable[..., Any], packs: list[Pack], tmp_path: Path, tiny_target: Path
) -> None:
    """Twice the same pack, all its blocks each time, makes the step of the pack alone."""
    settings = SETTINGS.model_copy(update={"anchors_per_step": 1000})
    weights = []
    for packs_per_step in (1, 2):
        drafter = make_drafter()
        changed = settings.model_copy(update={"packs_per_step": packs_per_step})
        loop = make_loop(drafter, packs[:1], tmp_path / str(packs_per_step), tiny_target, changed)
        loop._schedule = replace(loop._schedule, num_samples=10**9)  # the same rate at both steps
        loop.run(iter(packs[:1] * packs_per_step))
        assert loop.progress.step == 1 and loop.progress.num_consumed == packs_per_step * len(
            packs[0].indices
        )
        weights.append(trainable_state(drafter))
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-5, atol=1e-6)


def test_packs_without_a_block_are_passed_over_and_counted(
    make_drafter: Callable[..., Any], packs: list[Pack], tmp_path: Path, tiny_target: Path
) -> None:
    bare = replace(packs[1], supervised_T=torch.zeros_like(packs[1].supervised_T))
    loop = make_loop(make_drafter(), packs, tmp_path, tiny_target)
    loop.run(iter([bare, packs[0], bare, bare, packs[2]]))
    assert loop.progress.step == 2
    assert loop.progress.num_consumed == sum(
        len(pack.indices) for pack in (bare, packs[0], bare, bare, packs[2])
    )


def test_a_state_of_other_processes_is_refused(
    make_drafter: Callable[..., Any], packs: list[Pack], tmp_path: Path, tiny_target: Path
) -> None:
    loop = make_loop(make_drafter(), packs, tmp_path, tiny_target)
    with pytest.raises(TrainingError, match="number of processes"):
        loop.restore({"ranks": [{}, {}]})


def test_a_state_of_another_optimizer_is_refused(
    make_drafter: Callable[..., Any], packs: list[Pack], tmp_path: Path, tiny_target: Path
) -> None:
    loop = make_loop(
        make_drafter(),
        packs,
        tmp_path,
        tiny_target,
        SETTINGS.model_copy(update={"optimizer": "muon"}),
    )
    for state in ({"ranks": [{}], "optimizers": [{}]}, {"ranks": [{}], "optimizer": {}}):
        with pytest.raises(TrainingError, match=r"another optimizer.*expected muon"):
            loop.restore(state)
