"""What is measured of the served drafters."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from components.contracts import RivalMethod
from components.settings.base import Settings


class EvaluationSettings(Settings):
    """What is measured on vLLM as served."""

    slices: dict[str, int] = Field(description="prompts per held-out slice: mt_bench, humaneval, gsm_symbolic, ...")
    max_tokens: int = Field(default=96, ge=8)
    temperatures: tuple[float, ...] = Field(
        default=(0.0,), min_length=1, description="the first is measured in full, the others on num_sampled_prompts"
    )
    num_sampled_prompts: int = Field(
        default=16, ge=2, description="prompts, of all slices, per further temperature or length"
    )
    acceptance_concurrency: int = Field(default=4, ge=1, description="requests in flight while acceptance is measured")
    speed_concurrency: tuple[int, ...] = (1, 4, 8)
    speed_requests: int = Field(default=8, ge=1, description="requests per arm and concurrency")
    speed_repeats: int = Field(default=3, ge=1, description="interleaved rounds; medians are reported")
    draft_lengths: tuple[int, ...] = Field(
        default=(),
        description="numbers of draft tokens below the drafter's own to measure too, each on one more engine:"
        " acceptance over num_sampled_prompts, and speed; the shipped schedule takes the fastest at each load",
    )
    rivals: tuple[RivalMethod, ...] = Field(
        default=(),
        description="ways of drafting without a drafter to measure beside the candidate, each on one"
        " more engine over all prompts: ngram, and suffix, which needs the package arctic-inference",
    )
    rival_draft_tokens: int = Field(default=5, ge=1, description="most draft tokens of a rival per target step")
    ngram_lookup: tuple[int, int] = Field(
        default=(2, 5), description="shortest and longest run of tokens that the ngram rival looks up"
    )
    num_untrained_prompts: int = Field(default=8, ge=0, description="prompts the untrained drafter is measured on")
    num_gap_prompts: int = Field(
        default=16, ge=1, description="prompts, of all slices, for gate.max_train_served_gap, where that is set"
    )
    max_excluded_share: float = Field(default=0.1, ge=0, lt=1, description="prompts the engine may refuse as too long")
    measure_schedule: bool = Field(
        default=False, description="measure the speed of the schedule that would be shipped, on one more engine"
    )
    prompts_per_checkpoint: int = Field(
        default=64, ge=1, description="kept and checked together: what an engine that dies costs at most"
    )

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if min(self.temperatures) < 0 or len(set(self.temperatures)) != len(self.temperatures):
            raise ValueError("temperatures must differ and not be negative")
        if min(self.draft_lengths, default=1) < 1 or len(set(self.draft_lengths)) != len(self.draft_lengths):
            raise ValueError("draft_lengths must differ and be at least 1")
        if len(set(self.rivals)) != len(self.rivals):
            raise ValueError("rivals must differ")
        if not 1 <= self.ngram_lookup[0] <= self.ngram_lookup[1]:
            raise ValueError("ngram_lookup must be two lengths of at least 1, the shorter first")
        return self

    @property
    def temperature(self) -> float:
        """The one that all prompts, the losslessness check and the speed are measured at."""
        return self.temperatures[0]
