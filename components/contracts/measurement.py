"""What was measured of single requests, and of one arm at one concurrency."""

from __future__ import annotations

from pydantic import Field

from components.contracts.record import Record


class PromptMeasurement(Record):
    """One request, as the engine itself reported it."""

    prompt_id: str
    slice: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int = Field(description="speculative target steps; 0 with no drafter")
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_by_position: tuple[int, ...] = Field(description="accepted drafts at positions 1..K")
    latency_s: float
    output_digest: str = Field(description="sha256 of the generated text")


class ServedAnswer(Record):
    """An answer to the token, and the engine's own count of the steps it took."""

    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = Field(description="as answered; an end token included")
    num_steps: int = Field(description="speculative target steps")
    accepted_by_position: tuple[int, ...] = Field(description="steps that accepted drafts 1..k")


class SpeedPoint(Record):
    """Throughput and latency of one arm at one concurrency."""

    concurrency: int
    num_requests: int
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    round_tokens_per_s: tuple[float, ...] = Field(
        default=(), description="output_tokens_per_s of each interleaved round, in order: how noisy the machine was"
    )
