"""The learning rate by steps, data and time; states on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from components.errors import CheckpointError
from components.training.optimizing.learning_rate import LearningRateSchedule
from components.training.state import StateFolder


def schedule(**changes: object) -> LearningRateSchedule:
    fields = {
        "learning_rate": 1.0,
        "warmup_share": 0.1,
        "num_samples": 100,
        "num_steps": None,
        "max_trainer_s": None,
    }
    return LearningRateSchedule(**{**fields, **changes})


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    plan = schedule()
    assert plan.rate(0.05) == pytest.approx(0.5)
    assert plan.rate(0.1) == pytest.approx(1.0)
    assert plan.rate(0.55) == pytest.approx(0.5)
    assert plan.rate(1.0) == pytest.approx(0.0)
    assert plan.rate(0.0) > 0
    assert schedule(warmup_share=0.0).rate(0.0) == 1.0


def test_the_share_is_the_largest_of_samples_steps_and_time() -> None:
    plan = schedule(num_steps=10, max_trainer_s=50.0)
    assert plan.share_done(step=1, num_consumed=20, elapsed_s=5) == 0.2
    assert plan.share_done(step=4, num_consumed=20, elapsed_s=5) == 0.4
    assert plan.share_done(step=4, num_consumed=20, elapsed_s=45) == 0.9
    assert plan.share_done(step=4, num_consumed=20, elapsed_s=90) == 1.0


def test_limits_end_the_run() -> None:
    plan = schedule(num_steps=10, max_trainer_s=50.0)
    assert plan.stopped_by(step=9, elapsed_s=49) is None
    assert plan.stopped_by(step=10, elapsed_s=0) == "steps"
    assert plan.stopped_by(step=0, elapsed_s=50) == "time"


def test_the_newest_states_are_kept_and_read_back(tmp_path: Path) -> None:
    states = StateFolder(tmp_path / "state", keep=2)
    assert states.load_newest() is None and states.load_best() is None
    for step in (10, 20, 30):
        states.save({"step": step, "w": torch.full((3,), float(step))}, step=step)
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == [
        "step-00000020",
        "step-00000030",
    ]
    newest = states.load_newest()
    assert newest is not None and newest["step"] == 30 and newest["w"].tolist() == [30.0] * 3
    states.save_best({"w": torch.ones(1)})
    best = states.load_best()
    assert best is not None and best["w"].item() == 1.0


def test_a_torn_state_is_never_the_newest_and_damage_is_named(tmp_path: Path) -> None:
    states = StateFolder(tmp_path, keep=2)
    states.save({"step": 1}, step=1)
    (tmp_path / ".step-00000002-abc").mkdir()
    (tmp_path / "step-00000003").mkdir()
    newest = states.load_newest()
    assert newest is not None and newest["step"] == 1
    (tmp_path / "step-00000001" / "state.pt").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read"):
        states.load_newest()


def test_a_full_disk_leaves_older_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = StateFolder(tmp_path, keep=2)
    states.save({"step": 1}, step=1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="No space left"):
        states.save({"step": 2}, step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
