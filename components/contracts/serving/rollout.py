"""A candidate's rollout over growing shares of the traffic."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from components.contracts.record import Record


class CanaryStep(Record):
    """One step of a rollout: a traffic share, what each arm did, and the judge's word."""

    weight_percent: int = Field(description="share of requests sent to the candidate")
    started_at: datetime
    duration_s: float
    num_requests: dict[str, int] = Field(description="by slot")
    num_errors: dict[str, int]
    acceptance_length: float | None = Field(description="of the candidate arm during the step")
    draft_coverage: float | None
    latency_p50_s: dict[str, float | None]
    latency_p95_s: dict[str, float | None]
    healthy: bool
    reason: str


class CanaryReport(Record):
    """A finished rollout."""

    candidate_digest: str
    baseline: str = Field(description="'champion' or 'no_draft'")
    steps: tuple[CanaryStep, ...]
    promoted: bool
    rolled_back_to: str | None = Field(
        default=None, description="'champion' or 'no_draft' when not promoted"
    )
    reason: str
    created_at: datetime
