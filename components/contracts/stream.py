"""What became of the hidden states that a training run streamed."""

from __future__ import annotations

from pydantic import Field

from components.contracts.record import Record


class StreamReport(Record):
    """What the hidden-state stream did during one training run."""

    num_samples: int
    num_tokens: int
    bytes_streamed: int
    budget_bytes: int
    peak_bytes_held: int = Field(
        description="largest store content plus reader buffers seen at once"
    )
    bytes_on_disk: int = Field(
        description="hidden-state bytes written to disk: measured, expected 0"
    )
    keys_left: int = Field(description="keys of this run left in the store at the end")
    num_cached: int = Field(default=0, description="of the samples, read from the cache on disk")
    cache_bytes: int = Field(
        default=0, description="what the cache holds at the end; 0 in mode online"
    )
    num_retried: int
    num_quarantined: int
    quarantine_reasons: dict[str, int]
    trainer_wait_share: float = Field(
        description="share of trainer wall time spent waiting for states, 0 to 1"
    )
    engine_idle_share: float = Field(
        default=0.0, description="share of it in which no engine had a request, 0 to 1"
    )
    tokens_per_s: float
    duration_s: float
