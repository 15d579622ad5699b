"""Frozen, metadata-only records passed between stages. No tensors, no clients, no behaviour beyond
digests and files.

Every record serialises to JSON; `digest` is the sha256 of its canonical JSON, so a record can be
checked later wherever it turns up. Records refer to large things (datasets, checkpoints) by path
and content digest. One module per concept; importers take every name from here.
"""

from __future__ import annotations

from components.contracts.calibration import (
    Calibration,
    PrefixThreshold,
    ReliabilityBin,
    ReliabilityFigures,
)
from components.contracts.change import ChangeAction, ChangeKind, TargetChange
from components.contracts.checkpoint import (
    CALIBRATION_FILE,
    FINGERPRINT_FILE,
    CheckpointRef,
    digest_checkpoint,
)
from components.contracts.dataset import DatasetRef, is_held_out
from components.contracts.digests import digest_file, digest_json
from components.contracts.files import append_line, write_atomic
from components.contracts.gate.acceptance import (
    AcceptanceReport,
    ArmReport,
    DraftLengthReport,
    RivalReport,
    TemperatureReport,
    TrainServedGap,
)
from components.contracts.gate.answers import PlainAnswer, PlainAnswers
from components.contracts.gate.compatibility import (
    FEATURES,
    CompatibilityRow,
    CompatibilityTable,
    RequestFeature,
    Served,
)
from components.contracts.gate.decision import GateDecision, RuleResult, Verdict
from components.contracts.gate.losslessness import Divergence, SampledOutputs, SelfComparison
from components.contracts.gate.measurement import (
    ArmGroups,
    GroupAcceptance,
    PromptMeasurement,
    ServedAnswer,
    SpeedPoint,
    WarmPrefixPoint,
)
from components.contracts.gate.rivals import Rival, RivalComparison, RivalMethod, Standing
from components.contracts.pace import Amounts, MachineProbe, PacePlan
from components.contracts.progress import Progress, StageTiming, now_utc
from components.contracts.record import Record, Reference
from components.contracts.release import Promotion, Release
from components.contracts.serving.arms import Arm, Schedule, ScheduleRow, Slot, draft_tokens_at
from components.contracts.serving.endpoints import ArmEndpoint, StoreEndpoint
from components.contracts.serving.rollout import CanaryReport, CanaryStep
from components.contracts.stream import StreamReport
from components.contracts.target import TargetFingerprint, TargetRef

__all__ = [
    "CALIBRATION_FILE",
    "FEATURES",
    "FINGERPRINT_FILE",
    "AcceptanceReport",
    "Amounts",
    "Arm",
    "ArmEndpoint",
    "ArmGroups",
    "ArmReport",
    "Calibration",
    "CanaryReport",
    "CanaryStep",
    "ChangeAction",
    "ChangeKind",
    "CheckpointRef",
    "CompatibilityRow",
    "CompatibilityTable",
    "DatasetRef",
    "Divergence",
    "DraftLengthReport",
    "GateDecision",
    "GroupAcceptance",
    "MachineProbe",
    "PacePlan",
    "PlainAnswer",
    "PlainAnswers",
    "PrefixThreshold",
    "Progress",
    "Promotion",
    "PromptMeasurement",
    "Record",
    "Reference",
    "Release",
    "ReliabilityBin",
    "ReliabilityFigures",
    "RequestFeature",
    "Rival",
    "RivalComparison",
    "RivalMethod",
    "RivalReport",
    "RuleResult",
    "SampledOutputs",
    "Schedule",
    "ScheduleRow",
    "SelfComparison",
    "Served",
    "ServedAnswer",
    "Slot",
    "SpeedPoint",
    "StageTiming",
    "Standing",
    "StoreEndpoint",
    "StreamReport",
    "TargetChange",
    "TargetFingerprint",
    "TargetRef",
    "TemperatureReport",
    "TrainServedGap",
    "Verdict",
    "WarmPrefixPoint",
    "append_line",
    "digest_checkpoint",
    "digest_file",
    "digest_json",
    "draft_tokens_at",
    "is_held_out",
    "now_utc",
    "write_atomic",
]
