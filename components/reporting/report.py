"""The record of one run of the whole loop: every figure that the terminal, the Markdown and the
plots show.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from components.contracts import (
    AcceptanceReport,
    Arm,
    ArmReport,
    Calibration,
    CanaryReport,
    ChangeAction,
    ChangeKind,
    CheckpointRef,
    DatasetRef,
    GateDecision,
    PacePlan,
    Record,
    Release,
    StageTiming,
    StreamReport,
    TargetChange,
    TargetRef,
)


class ReportedPoint(Record):
    """One logged training step."""

    step: int
    loss: float
    acceptance_length: float | None = Field(
        default=None, description="teacher-forced, where it was measured"
    )


class ArmFigures(Record):
    """The figures of one served arm that a side-by-side needs."""

    acceptance_length: float
    acceptance_interval: tuple[float, float] | None = None
    output_tokens_per_s: dict[int, float] = Field(default={}, description="by requests in flight")

    @classmethod
    def of(cls, arm: ArmReport) -> ArmFigures:
        """The figures of a measured arm."""
        return cls(
            acceptance_length=arm.acceptance_length,
            acceptance_interval=arm.acceptance_interval,
            output_tokens_per_s={
                point.requests_in_flight: point.output_tokens_per_s for point in arm.speed
            },
        )


class TargetChangeReport(Record):
    """What the loop did about one change of the target."""

    name: str = Field(description="what changed, for people: 'INT8 W8A8 quantization'")
    kinds: tuple[ChangeKind, ...]
    action: ChangeAction = Field(
        description="what was done after the measurement: nothing, rebind or retrain"
    )
    reason: str
    released_acceptance_length: float | None = Field(
        default=None, description="of the champion on the old target"
    )
    old_drafter: ArmFigures | None = Field(
        default=None, description="the champion, served on the new target"
    )
    new_drafter: ArmFigures | None = Field(
        default=None, description="the release made for the new target"
    )
    no_draft: ArmFigures | None = Field(
        default=None, description="the new target without a drafter"
    )
    detected_s: float | None = Field(default=None, description="from publication to detection")
    stages: tuple[StageTiming, ...] = ()
    total_s: float
    gate: GateDecision | None = None
    canary: CanaryReport | None = None
    release: Release | None = None
    outcome: str


class LifecycleReport(Record):
    """One run of the loop. Stages that were not reached leave their part None."""

    recipe: str
    size: str | None = None
    target: TargetRef
    change: TargetChange | None = Field(
        default=None, description="against the target the champion is bound to"
    )
    action: ChangeAction | None = Field(
        default=None, description="what was done: rebind, retrain, or nothing measured"
    )
    policy_reason: str | None = Field(
        default=None, description="what the re-measurement said and which rule followed"
    )
    champion: Release | None = Field(default=None, description="in service when the run began")
    remeasured_acceptance_length: float | None = Field(
        default=None, description="of that champion on this target"
    )
    stages: tuple[StageTiming, ...]
    total_s: float
    orchestration_share: float = Field(description="wall time outside all stages / total, 0 to 1")
    dataset: DatasetRef | None = None
    stream: StreamReport | None = None
    training_curve: tuple[ReportedPoint, ...] = ()
    checkpoint: CheckpointRef | None = None
    calibration: Calibration | None = Field(
        default=None, description="of that checkpoint's confidence head"
    )
    acceptance: AcceptanceReport | None = None
    gate: GateDecision | None = None
    canary: CanaryReport | None = None
    release: Release | None = None
    peak_memory_mib: float | None = Field(
        default=None, description="of everything that ran: flows, engines, services"
    )
    target_changes: tuple[TargetChangeReport, ...] = ()
    urls: dict[str, str] = Field(default={}, description="user interfaces by name")
    pace: PacePlan | None = Field(
        default=None,
        description="what was chosen by the machine's pace; None: the recipe's own amounts",
    )
    training_ended: str | None = Field(
        default=None, description="where training ended, and by what"
    )
    serving: str | None = Field(
        default=None, description="what answers at the endpoint when the run ends"
    )
    outcome: str


def orchestration_share(stages: Sequence[StageTiming], total_s: float) -> float:
    """Share of `total_s` in which no stage was at work, 0 to 1. Stages that overlap count once."""
    spans = sorted(
        (stage.started_at.timestamp(), stage.started_at.timestamp() + stage.duration_s)
        for stage in stages
    )
    covered_s = 0.0
    reached = float("-inf")
    for start, end in spans:
        covered_s += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return min(1.0, max(0.0, 1.0 - covered_s / total_s)) if total_s > 0 else 0.0


def speedup(
    acceptance: AcceptanceReport, *, arm: str = Arm.CANDIDATE, over: str = Arm.NO_DRAFT
) -> dict[int, float]:
    """tok/s of `arm` over tok/s of `over` at each load that both have."""
    if arm not in acceptance.arms or over not in acceptance.arms:
        return {}
    base = {
        point.requests_in_flight: point.output_tokens_per_s for point in acceptance.arms[over].speed
    }
    return {
        point.requests_in_flight: point.output_tokens_per_s / base[point.requests_in_flight]
        for point in acceptance.arms[arm].speed
        if base.get(point.requests_in_flight, 0.0) > 0
    }
