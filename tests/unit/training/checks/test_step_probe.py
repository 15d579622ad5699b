"""The training step's probe: the recipe's own objective, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.errors import ConfigError
from components.settings import DrafterSettings, TrainingSettings
from components.training.checks.step_job import StepJob, run_step_probe
from components.training.checks.step_probe import measure_steps


def job(target: Path, folder: Path, **drafter: object) -> StepJob:
    settings = {
        "num_layers": 2,
        "block_size": 4,
        "markov_rank": 8,
        "draft_vocab_size": 256,
        **drafter,
    }
    return StepJob(
        drafter=DrafterSettings.model_validate(settings),
        training=TrainingSettings(tokens_per_step=96, anchors_per_step=16, mixed_precision="no"),
        target_path=str(target),
        aux_layer_ids=(1, 3),
        num_steps=3,
        output_dir=str(folder),
    )


@pytest.mark.parametrize("algorithm", ["dspark", "eagle3"])
def test_the_median_of_as_many_steps_as_asked_for(
    tiny_target: Path, tmp_path: Path, algorithm: str
) -> None:
    shape = {"algorithm": algorithm}
    if algorithm == "eagle3":
        shape |= {"markov_rank": 0, "confidence_head": False, "num_layers": 1}
    times = measure_steps(job(tiny_target, tmp_path, **shape))
    assert len(times.seconds) == 3
    assert times.median_s == sorted(times.seconds)[1] > 0
    assert times.loop_s > sum(times.seconds)  # the first step is not timed


def test_the_process_hands_back_its_times_and_what_its_start_took(
    tiny_target: Path, tmp_path: Path
) -> None:
    times = run_step_probe(job(tiny_target, tmp_path), on_line=print, timeout_s=500)
    assert len(times.seconds) == 3
    assert times.up_s > 0.5  # torch and speculators are imported there


def test_a_drafter_that_does_not_fit_is_one_clear_error(tiny_target: Path, tmp_path: Path) -> None:
    bad = job(tiny_target, tmp_path).model_copy(update={"aux_layer_ids": (1, 99)})
    with pytest.raises(ConfigError, match="99"):
        measure_steps(bad)
