"""The served measurement of all arms, that a gate decides by."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Self

from pydantic import Field, model_validator

from components.contracts.gate.compatibility import CompatibilityTable
from components.contracts.gate.losslessness import Divergence, SampledOutputs, SelfComparison
from components.contracts.gate.measurement import PromptMeasurement, SpeedPoint, WarmPrefixPoint
from components.contracts.gate.rivals import Rival
from components.contracts.record import Record
from components.contracts.serving.arms import Arm
from components.contracts.target import TargetRef


class TrainServedGap(Record):
    """Acceptance length of the same prompts, three ways. Lengths are tokens kept per target step:
    all tokens of an answer but the first, which the prefill gives, over its steps.
    """

    teacher_forced: float = Field(description="the trained objective over the served answers")
    reference: float = Field(description="reference decoding of the prompts")
    served: float = Field(description="vLLM")
    diverging_position: int | None = Field(
        default=None,
        description="draft position (from 1) whose acceptance differs most; None where all agree",
    )
    num_prompts: int
    acceptance_by_position: dict[str, tuple[float, ...]] = Field(
        default_factory=dict, description="per way: share of steps that accepted drafts 1..k"
    )

    @property
    def gap(self) -> float:
        """Largest relative difference from what is served, not negative; infinite where nothing was
        served.
        """
        if self.served <= 0:
            return float("inf")
        return max(
            abs(self.teacher_forced / self.served - 1), abs(self.reference / self.served - 1)
        )


class ArmReport(Record):
    """One arm (candidate, champion, untrained or no_draft) over the same prompts."""

    arm: str
    checkpoint_digest: str | None
    acceptance_length: float = Field(description="(accepted + steps) / steps; 1.0 with no drafter")
    acceptance_interval: tuple[float, float] | None = Field(
        default=None, description="95 % interval over prompts"
    )
    acceptance_by_slice: dict[str, float]
    interval_by_slice: dict[str, tuple[float, float]] = Field(
        default={},
        description="95 % interval over prompts; slices with one prompt or no drafter have none",
    )
    acceptance_by_position: tuple[float, ...] = Field(
        description="share of steps whose draft position k was accepted"
    )
    draft_coverage: float = Field(description="(steps + accepted) / output tokens, 0 to 1")
    prompts: tuple[PromptMeasurement, ...]
    speed: tuple[SpeedPoint, ...]
    engine_counters: dict[str, float] = Field(
        description="vllm:spec_decode_* deltas over the measurement"
    )
    acceptance_histogram: tuple[int, ...] = Field(
        default=(),
        description="target steps that accepted exactly 0, 1, ... K draft tokens; empty with no "
        "drafter",
    )
    peak_memory_bytes: int | None = Field(
        default=None,
        description="largest memory of the engine's processes while it was measured; None: not "
        "measured",
    )

    @model_validator(mode="after")
    def _each_prompt_once(self) -> Self:
        repeated = [
            name for name, count in Counter(p.prompt_id for p in self.prompts).items() if count > 1
        ]
        if repeated:
            raise ValueError(f"arm '{self.arm}' holds a prompt more than once: {repeated[0]}")
        return self


class TemperatureReport(Record):
    """The arms over the first prompts of the measurement at a further temperature."""

    temperature: float
    arms: dict[str, ArmReport]


class DraftLengthReport(Record):
    """The candidate with fewer draft tokens per step than its block holds, over some prompts of the
    measurement.
    """

    num_draft_tokens: int
    arm: ArmReport
    no_draft_speed: tuple[SpeedPoint, ...] = Field(
        description="no draft once more, in turns with it"
    )


class RivalReport(Record):
    """Drafting without a drafter, over the same prompts as the candidate; its speed in turns with
    no draft.
    """

    rival: Rival
    arm: ArmReport = Field(description="lengths over the steps that had a draft, as in every arm")
    no_draft_speed: tuple[SpeedPoint, ...] = Field(
        description="no draft once more, in turns with it"
    )


class AcceptanceReport(Record):
    """Served measurement of all arms on one target, paired over the same prompts.

    A report that contradicts itself is refused: arms under another name, a count of equal outputs
    that the digests do not give, a divergence of outputs that are equal.
    """

    target: TargetRef
    recipe: str = Field(default="", description="name of the recipe it was measured by")
    size: str | None = Field(default=None, description="overlay of the recipe")
    look: int = Field(
        default=1,
        ge=1,
        description="how often this candidate was measured for a decision on this target, this "
        "included",
    )
    dtype: str = Field(default="bfloat16", description="that the engines computed in")
    temperature: float = Field(ge=0)
    max_tokens: int = Field(ge=1)
    prompt_digest: str
    arms: dict[str, ArmReport]
    num_equal_outputs: int = Field(
        ge=0,
        description="prompts whose candidate output equals no_draft's at temperature 0, by "
        "their digests",
    )
    num_compared_outputs: int = Field(ge=0)
    divergences: dict[str, Divergence] = Field(
        default={},
        description="by prompt id: where the candidate's greedy output parts from no_draft's",
    )
    self_comparisons: tuple[SelfComparison, ...] = Field(
        default=(),
        description="no_draft against itself, in turns with the arms, by requests in flight",
    )
    sampled_outputs: tuple[SampledOutputs, ...] = ()
    excluded: dict[str, str] = Field(
        default={}, description="prompt id to reason; left out of every arm"
    )
    further_temperatures: tuple[TemperatureReport, ...] = ()
    draft_lengths: tuple[DraftLengthReport, ...] = ()
    warm_prefix: tuple[WarmPrefixPoint, ...] = ()
    rivals: tuple[RivalReport, ...] = ()
    compatibility: CompatibilityTable | None = Field(
        default=None, description="kinds of request with the candidate and without a drafter"
    )
    train_served_gap: TrainServedGap | None = None
    engine_version: str
    created_at: datetime

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, arm in self.arms.items():
            if arm.arm != name:
                raise ValueError(f"the arm under '{name}' calls itself '{arm.arm}'")

        equal, different = self.compared_outputs()
        told = (self.num_equal_outputs, self.num_compared_outputs)
        if told != (len(equal), len(equal) + len(different)):
            raise ValueError(
                f"{told[0]} of {told[1]} outputs are said to be equal, but the digests give "
                f"{len(equal)} of"
                f" {len(equal) + len(different)}"
            )

        unfounded = sorted(set(self.divergences) - different)
        if unfounded:
            raise ValueError(f"a divergence is told of {unfounded[0]}, whose outputs do not differ")

        for comparison in self.self_comparisons:
            self._check_self_comparison(comparison)
        return self

    def compared_outputs(self) -> tuple[set[str], set[str]]:
        """Ids of the prompts whose greedy output is the same with and without the drafter, and of
        those it is not.

        Both are empty where outputs cannot be compared: above temperature 0, or without one of the
        two arms.
        """
        if self.temperature > 0 or not {Arm.CANDIDATE, Arm.NO_DRAFT} <= set(self.arms):
            return set(), set()
        ours, plain = (self._digests(arm) for arm in (Arm.CANDIDATE, Arm.NO_DRAFT))
        common = ours.keys() & plain.keys()
        equal = {prompt_id for prompt_id in common if ours[prompt_id] == plain[prompt_id]}
        return equal, set(common) - equal

    def _digests(self, arm: str) -> dict[str, str]:
        return {prompt.prompt_id: prompt.output_digest for prompt in self.arms[arm].prompts}

    def _check_self_comparison(self, comparison: SelfComparison) -> None:
        plain = self._digests(Arm.NO_DRAFT) if Arm.NO_DRAFT in self.arms else {}
        unknown = sorted(set(comparison.digests) - set(plain))
        if unknown:
            raise ValueError(
                f"no_draft is compared with itself on {unknown[0]}, which it did not answer"
            )

        different = {name for name, digest in comparison.digests.items() if digest != plain[name]}
        if different != set(comparison.divergences):
            raise ValueError(
                f"no_draft at {comparison.num_in_flight} in flight: {len(different)} outputs "
                "differ from its first"
                f" ones, but {len(comparison.divergences)} divergences are told"
            )
