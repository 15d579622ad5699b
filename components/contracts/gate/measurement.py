"""What was measured of single requests, and of one arm at one load."""

from __future__ import annotations

from itertools import pairwise
from typing import Self

from pydantic import Field, model_validator

from components.contracts.record import Record


class PromptMeasurement(Record):
    """One request, as the engine itself reported it.

    Counts that cannot be are refused: drafts are accepted left to right, so at most as many at a
    position as at the one before it, none without a step, and no more than were drafted.
    """

    prompt_id: str = Field(min_length=1)
    slice: str
    num_prompt_tokens: int = Field(ge=0)
    num_output_tokens: int = Field(ge=0)
    num_steps: int = Field(ge=0, description="speculative target steps; 0 with no drafter")
    num_draft_tokens: int = Field(ge=0)
    num_accepted_tokens: int = Field(ge=0)
    accepted_by_position: tuple[int, ...] = Field(description="accepted drafts at positions 1..K")
    latency_s: float
    output_digest: str = Field(description="sha256 of the generated token ids")
    language: str | None = Field(
        default=None,
        description="ISO 639-1 code of the user's text; None: too short to tell, or not looked at",
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        accepted = (self.num_steps, *self.accepted_by_position)
        if min(accepted) < 0 or any(later > earlier for earlier, later in pairwise(accepted)):
            raise ValueError(
                f"{self.prompt_id}: accepted by position {list(self.accepted_by_position)} "
                "cannot be of"
                f" {self.num_steps} steps: drafts are accepted left to right"
            )
        if sum(self.accepted_by_position) != self.num_accepted_tokens:
            raise ValueError(
                f"{self.prompt_id}: {self.num_accepted_tokens} accepted tokens, but"
                f" {sum(self.accepted_by_position)} by position"
            )
        if self.num_accepted_tokens > self.num_draft_tokens:
            raise ValueError(
                f"{self.prompt_id}: {self.num_accepted_tokens} tokens accepted of "
                f"{self.num_draft_tokens} drafted"
            )

        return self


class ServedAnswer(Record):
    """An answer to the token, and the engine's own count of the steps it took."""

    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = Field(description="as answered; an end token included")
    num_steps: int = Field(description="speculative target steps")
    accepted_by_position: tuple[int, ...] = Field(description="steps that accepted drafts 1..k")


class SpeedPoint(Record):
    """Throughput and latency of one arm at one load."""

    requests_in_flight: int = Field(ge=1)
    num_requests: int = Field(ge=0)
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    round_tokens_per_s: tuple[float, ...] = Field(
        default=(),
        description="output_tokens_per_s of each interleaved round, in order: how noisy the "
        "machine was",
    )


class GroupAcceptance(Record):
    """Acceptance length over some of an arm's prompts: those of one length, or of one language."""

    group: str
    num_prompts: int = Field(description="with at least one speculative step")
    acceptance_length: float = Field(description="(accepted + steps) / steps, at least 1")
    interval: tuple[float, float] | None = Field(
        description="95 % interval over prompts; None with one prompt, or where all are alike"
    )


class ArmGroups(Record):
    """One arm's acceptance by length of the prompt and by language."""

    arm: str
    by_length: tuple[GroupAcceptance, ...]
    by_language: tuple[GroupAcceptance, ...]


class WarmPrefixPoint(Record):
    """One arm's answers to the same questions on one long prefix, never seen before and seen."""

    arm: str
    num_questions: int
    num_prompt_tokens: float = Field(description="of prefix and question, median")
    ttft_cold_ms: float = Field(description="time to first token, median")
    ttft_warm_ms: float = Field(description="time to first token, median")
    acceptance_cold: float | None = Field(description="tokens per target step; None: no drafter")
    acceptance_warm: float | None = Field(description="tokens per target step; None: no drafter")
    cached_cold: float | None = Field(
        description="prompt tokens from the cache, median; None where the engine does not say"
    )
    cached_warm: float | None = Field(
        description="prompt tokens from the cache, median; None where the engine does not say"
    )

    @property
    def ttft_ratio(self) -> float:
        """Time to first token warm over cold."""
        return self.ttft_warm_ms / self.ttft_cold_ms
