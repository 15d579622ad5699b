"""What a changed target asks for: nothing, a measurement, a re-bind or a retrain."""

from __future__ import annotations

import math

from pydantic import Field

from components.contracts import ChangeAction, ChangeKind, Record, TargetChange, TargetFingerprint
from components.errors import EvaluationError
from components.settings import WatchSettings

_REASONS = {
    ChangeKind.TOKENIZER: "the tokenizer changed: draft vocabulary, dataset and anchors no "
    "longer mean the same tokens",
    ChangeKind.WEIGHTS: "the weights changed: the drafter may or may not still match, so "
    "measure it first",
    ChangeKind.QUANTIZATION: (
        "the quantization changed, and the stored weights with it: it may cost nothing or "
        "everything, so measure first"
    ),
    ChangeKind.SERVING: "the serving settings changed: numbers or limits differ, so measure the "
    "drafter first",
    ChangeKind.NONE: "the target is the one the drafter is bound to",
}


MIN_PAIRED_PROMPTS = 8
"""Fewer prompts say nothing about a few percent of acceptance."""


class MeasuredPolicy(Record):
    """What follows from measuring the old drafter on the new target, with the numbers and the rule
    it used.
    """

    old_acceptance_length: float = Field(description="of the release, on the target it is bound to")
    new_acceptance_length: float = Field(description="of the same drafter, on the new target")
    share: float = Field(description="new over old")
    threshold: float = Field(description="share at or above which the drafter is re-bound")
    action: ChangeAction
    reason: str


def classify_change(old: TargetFingerprint | None, new: TargetFingerprint) -> TargetChange:
    """Compare the fingerprint a release is bound to (None: no release yet) with the one found now.

    Re-quantizing rewrites every stored weight, so WEIGHTS is only named when the quantization is
    the same: with both digests changed, nothing short of a measurement can tell whether the
    underlying weights changed too.
    """
    if old is None:
        return TargetChange(
            old=None,
            new=new,
            kinds=(),
            action=ChangeAction.RETRAIN,
            reason="no release yet: train the first drafter",
        )

    kinds = _kinds(old, new)
    if ChangeKind.TOKENIZER in kinds:
        action = ChangeAction.RETRAIN
    elif kinds == (ChangeKind.NONE,):
        action = ChangeAction.NOTHING
    else:
        action = ChangeAction.REMEASURE

    return TargetChange(
        old=old, new=new, kinds=kinds, action=action, reason="; ".join(_REASONS[k] for k in kinds)
    )


def policy_after_measurement(
    *,
    old_acceptance_length: float,
    new_acceptance_length: float,
    num_prompts: int,
    settings: WatchSettings,
) -> MeasuredPolicy:
    """Re-bind when the drafter keeps `rebind_acceptance_share` of its acceptance length, else
    retrain.

    Both lengths count the bonus token and are measured as served, at equal settings and over the
    same `num_prompts` prompts. With fewer than `MIN_PAIRED_PROMPTS` of them nothing is known, and a
    new drafter is the safe answer.

    Raises:
        EvaluationError: a length is below 1 or not a number, so nothing was measured.
    """
    for length in (old_acceptance_length, new_acceptance_length):
        if not math.isfinite(length) or length < 1:
            raise EvaluationError(
                "this is not an acceptance length", got=length, expected="a number of at least 1"
            )

    share = new_acceptance_length / old_acceptance_length
    threshold = settings.rebind_acceptance_share
    numbers = (
        f"{new_acceptance_length:.3f} on the new target against {old_acceptance_length:.3f} "
        "over the same"
        f" {num_prompts} prompts: {share:.1%} kept"
    )

    holds = share >= threshold and num_prompts >= MIN_PAIRED_PROMPTS
    if num_prompts < MIN_PAIRED_PROMPTS:
        reason = f"{num_prompts} prompts in common, too few to compare the targets, so retrain"
    elif holds:
        reason = f"{numbers}, at or above {threshold:.1%}, so re-bind"
    else:
        reason = f"{numbers}, below {threshold:.1%}, so retrain"

    return MeasuredPolicy(
        old_acceptance_length=old_acceptance_length,
        new_acceptance_length=new_acceptance_length,
        share=share,
        threshold=threshold,
        action=ChangeAction.REBIND if holds else ChangeAction.RETRAIN,
        reason=reason,
    )


def _kinds(old: TargetFingerprint, new: TargetFingerprint) -> tuple[ChangeKind, ...]:
    """The changed parts, most severe first."""
    found = []
    if old.tokenizer != new.tokenizer:
        found.append(ChangeKind.TOKENIZER)
    if old.quantization != new.quantization:
        found.append(ChangeKind.QUANTIZATION)
    elif old.weights != new.weights:
        found.append(ChangeKind.WEIGHTS)
    if old.serving != new.serving:
        found.append(ChangeKind.SERVING)
    return tuple(found) or (ChangeKind.NONE,)
