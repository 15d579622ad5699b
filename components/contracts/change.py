"""How the target found now differs from the one a release is bound to, and what that asks for."""

from __future__ import annotations

from enum import StrEnum

from components.contracts.record import Record
from components.contracts.target import TargetFingerprint


class ChangeKind(StrEnum):
    """Which part of a target changed, most severe first."""

    TOKENIZER = "tokenizer"
    WEIGHTS = "weights"
    QUANTIZATION = "quantization"
    SERVING = "serving"
    NONE = "none"


class ChangeAction(StrEnum):
    """What the policy asks for: before a measurement, and (REBIND or RETRAIN) after one."""

    NOTHING = "nothing"
    REMEASURE = "remeasure"
    REBIND = "rebind"
    RETRAIN = "retrain"


class TargetChange(Record):
    """A classified difference between the target a release is bound to and the target found now."""

    old: TargetFingerprint | None
    new: TargetFingerprint
    kinds: tuple[ChangeKind, ...]
    action: ChangeAction
    reason: str
