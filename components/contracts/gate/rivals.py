"""Decoding without a drafter that drafts all the same: what is served, and how the candidate stands
beside it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from components.contracts.record import Record, Reference

RivalMethod = Literal["ngram", "suffix"]


class Rival(Reference):
    """A way of drafting that vLLM serves without training: it copies from the prompt and from what
    was answered.
    """

    method: RivalMethod
    num_draft_tokens: int = Field(
        ge=1, description="most drafts per target step; fewer, or none, where nothing fits"
    )
    lookup: tuple[int, int] = Field(
        default=(2, 5), description="ngram: shortest and longest run of tokens that is looked up"
    )


class Standing(StrEnum):
    """How the candidate stands to a rival."""

    BETTER = "better"
    NOT_SHOWN = "not shown better"
    WORSE = "worse"


class RivalComparison(Record):
    """Candidate and rival over the same prompts, in tokens kept per target step, steps without a
    draft included.
    """

    method: RivalMethod
    slice: str | None = Field(description="None: over all slices")
    candidate_length: float
    rival_length: float = Field(
        description="the most that the counts allow: its steps at their fewest"
    )
    rival_length_low: float = Field(
        description="the least that the counts allow: its steps at their most"
    )
    difference: float | None = Field(
        description="candidate over rival, less 1; None: nothing can be said"
    )
    interval: tuple[float, float] | None = Field(description="of `difference`, at `confidence`")
    confidence: float = Field(description="two-sided level of the interval, 0.95 for 95 %")
    p_better: float | None = Field(
        default=None, description="one-sided; of slices, Holm's adjustment over them"
    )
    p_worse: float | None = Field(
        default=None, description="one-sided; of slices, Holm's adjustment over them"
    )
    standing: Standing
    num_prompts: int
