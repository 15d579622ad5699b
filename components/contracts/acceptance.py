"""The served measurement of all arms, that a gate decides by."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from components.contracts.measurement import PromptMeasurement, SpeedPoint
from components.contracts.record import Record
from components.contracts.rivals import Rival
from components.contracts.target import TargetRef


class TrainServedGap(Record):
    """Acceptance length of the same prompts, three ways. Lengths are tokens kept per target step: all tokens of
    an answer but the first, which the prefill gives, over its steps."""

    teacher_forced: float = Field(description="the trained objective over the served answers")
    reference: float = Field(description="reference decoding of the prompts")
    served: float = Field(description="vLLM")
    diverging_position: int | None = Field(
        default=None, description="draft position (from 1) whose acceptance differs most; None where all agree"
    )
    num_prompts: int
    acceptance_by_position: dict[str, tuple[float, ...]] = Field(
        default_factory=dict, description="per way: share of steps that accepted drafts 1..k"
    )

    @property
    def gap(self) -> float:
        """Largest relative difference from what is served, not negative; infinite where nothing was served."""
        if self.served <= 0:
            return float("inf")
        return max(abs(self.teacher_forced / self.served - 1), abs(self.reference / self.served - 1))


class ArmReport(Record):
    """One arm (candidate, champion, untrained or no_draft) over the same prompts."""

    arm: str
    checkpoint_digest: str | None
    acceptance_length: float = Field(description="(accepted + steps) / steps; 1.0 with no drafter")
    acceptance_interval: tuple[float, float] | None = Field(default=None, description="95 % interval over prompts")
    acceptance_by_slice: dict[str, float]
    interval_by_slice: dict[str, tuple[float, float]] = Field(
        default={}, description="95 % interval over prompts; slices with one prompt or no drafter have none"
    )
    acceptance_by_position: tuple[float, ...] = Field(description="share of steps whose draft position k was accepted")
    draft_coverage: float = Field(description="(steps + accepted) / output tokens, 0 to 1")
    prompts: tuple[PromptMeasurement, ...]
    speed: tuple[SpeedPoint, ...]
    engine_counters: dict[str, float] = Field(description="vllm:spec_decode_* deltas over the measurement")
    acceptance_histogram: tuple[int, ...] = Field(
        default=(), description="target steps that accepted exactly 0, 1, ... K draft tokens; empty with no drafter"
    )
    peak_memory_bytes: int | None = Field(
        default=None, description="largest memory of the engine's processes while it was measured; None: not measured"
    )


class TemperatureReport(Record):
    """The arms over the first prompts of the measurement at a further temperature."""

    temperature: float
    arms: dict[str, ArmReport]


class DraftLengthReport(Record):
    """The candidate with fewer draft tokens per step than its block holds, over some prompts of the measurement."""

    num_draft_tokens: int
    arm: ArmReport
    no_draft_speed: tuple[SpeedPoint, ...] = Field(description="no draft once more, in turns with it")


class RivalReport(Record):
    """Drafting without a drafter, over the same prompts as the candidate; its speed in turns with no draft."""

    rival: Rival
    arm: ArmReport = Field(description="lengths over the steps that had a draft, as in every arm")
    no_draft_speed: tuple[SpeedPoint, ...] = Field(description="no draft once more, in turns with it")


class AcceptanceReport(Record):
    """Served measurement of all arms on one target, paired over the same prompts."""

    target: TargetRef
    temperature: float
    max_tokens: int
    prompt_digest: str
    arms: dict[str, ArmReport]
    num_equal_outputs: int = Field(description="prompts whose candidate output equals no_draft's at temperature 0")
    num_compared_outputs: int
    excluded: dict[str, str] = Field(default={}, description="prompt id to reason; left out of every arm")
    further_temperatures: tuple[TemperatureReport, ...] = ()
    draft_lengths: tuple[DraftLengthReport, ...] = ()
    rivals: tuple[RivalReport, ...] = ()
    train_served_gap: TrainServedGap | None = None
    engine_version: str
    created_at: datetime
