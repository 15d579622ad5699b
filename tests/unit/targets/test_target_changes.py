"""Classification of a changed fingerprint, and what a measurement decides."""

from __future__ import annotations

import math

import pytest

from components.contracts import ChangeAction, ChangeKind, TargetFingerprint
from components.errors import EvaluationError
from components.settings import WatchSettings
from components.targets.changes import classify_change, policy_after_measurement

OLD = TargetFingerprint(weights="w", quantization="q", tokenizer="t", serving="s")


@pytest.mark.parametrize(
    ("changes", "kinds", "action"),
    [
        ({}, (ChangeKind.NONE,), ChangeAction.NOTHING),
        ({"serving": "S"}, (ChangeKind.SERVING,), ChangeAction.REMEASURE),
        ({"weights": "W"}, (ChangeKind.WEIGHTS,), ChangeAction.REMEASURE),
        ({"weights": "W", "quantization": "Q"}, (ChangeKind.QUANTIZATION,), ChangeAction.REMEASURE),
        (
            {"weights": "W", "serving": "S"},
            (ChangeKind.WEIGHTS, ChangeKind.SERVING),
            ChangeAction.REMEASURE,
        ),
        ({"tokenizer": "T"}, (ChangeKind.TOKENIZER,), ChangeAction.RETRAIN),
        (
            {"tokenizer": "T", "weights": "W", "serving": "S"},
            (ChangeKind.TOKENIZER, ChangeKind.WEIGHTS, ChangeKind.SERVING),
            ChangeAction.RETRAIN,
        ),
    ],
)
def test_classification(
    changes: dict[str, str], kinds: tuple[ChangeKind, ...], action: ChangeAction
) -> None:
    change = classify_change(OLD, OLD.model_copy(update=changes))
    assert (change.kinds, change.action) == (kinds, action)
    assert change.reason


def test_no_release_yet_means_training() -> None:
    change = classify_change(None, OLD)
    assert (change.old, change.kinds, change.action) == (None, (), ChangeAction.RETRAIN)


@pytest.mark.parametrize(
    ("new", "action"),
    [
        (1.6, ChangeAction.REBIND),
        (1.5, ChangeAction.REBIND),
        (1.35, ChangeAction.REBIND),
        (1.34, ChangeAction.RETRAIN),
    ],
)
def test_policy_at_its_threshold(new: float, action: ChangeAction) -> None:
    decision = policy_after_measurement(
        old_acceptance_length=1.5,
        new_acceptance_length=new,
        num_prompts=8,
        settings=WatchSettings(rebind_acceptance_share=0.9),
    )
    assert decision.action is action
    assert decision.share == pytest.approx(new / 1.5)
    assert "90.0%" in decision.reason


@pytest.mark.parametrize("length", [0.9, math.nan, math.inf])
def test_what_was_not_measured_decides_nothing(length: float) -> None:
    with pytest.raises(EvaluationError, match="not an acceptance length"):
        policy_after_measurement(
            old_acceptance_length=1.5,
            new_acceptance_length=length,
            num_prompts=40,
            settings=WatchSettings(),
        )


def test_too_few_common_prompts_retrain() -> None:
    decision = policy_after_measurement(
        old_acceptance_length=1.5,
        new_acceptance_length=1.5,
        num_prompts=7,
        settings=WatchSettings(),
    )
    assert decision.action is ChangeAction.RETRAIN
    assert "7 prompts in common, too few" in decision.reason
