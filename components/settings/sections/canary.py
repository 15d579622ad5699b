"""The rollout of a candidate over growing shares of the traffic."""

from __future__ import annotations

from pydantic import Field

from components.settings.base import Settings


class CanarySettings(Settings):
    """Traffic shares and the judge's limits."""

    weights_percent: tuple[int, ...] = (1, 5, 25, 50, 100)
    step_s: float = Field(default=15, gt=0, description="least duration of a step")
    max_step_s: float = Field(
        default=120, gt=0, description="a step without enough requests by then is undecided"
    )
    min_requests: int = Field(
        default=1, ge=1, description="requests the candidate must answer in a step"
    )
    requests_in_flight: int = Field(default=4, ge=1, description="of the replayed traffic")
    max_tokens: int = Field(default=48, ge=1)
    max_error_share: float = Field(default=0.02, ge=0, le=1)
    min_acceptance_share: float = Field(
        default=0.8, gt=0, le=1, description="of the gate's acceptance length"
    )
    min_draft_coverage: float = Field(
        default=0.5, ge=0, le=1, description="not judged where a schedule has K = 0"
    )
    max_latency_ratio: float = Field(
        default=3.0, gt=0, description="candidate p95 over baseline p95, same step"
    )
    min_requests_for_statistics: int = Field(
        default=20, ge=2, description="below this latency is not judged"
    )
    min_steps_for_acceptance: int = Field(
        default=100, ge=1, description="below this acceptance is not judged"
    )
