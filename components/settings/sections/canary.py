"""The rollout of a candidate over growing shares of the traffic."""

from __future__ import annotations

from pydantic import Field

from components.settings.base import Settings


class CanarySettings(Settings):
    """The rollout of a release: its shares of the traffic, the prompts that are replayed meanwhile,
    and the judge's limits.

    A step that is unhealthy, or still undecided at its longest duration, sends all traffic back.
    """

    weights_percent: tuple[int, ...] = Field(
        default=(1, 5, 25, 50, 100),
        description="Share of the traffic in each step, in percent; the shares must rise and end"
        " at 100.",
    )
    step_s: float = Field(
        default=15,
        gt=0,
        description="Least seconds of a step; raise it where trouble takes longer to show.",
    )
    max_step_s: float = Field(
        default=120,
        gt=0,
        description="Seconds after which a step that is still undecided counts as unhealthy; keep"
        " it well above `step_s`.",
    )
    min_requests: int = Field(
        default=1,
        ge=1,
        description="Requests that the candidate must have answered in a step before it is called"
        " healthy.",
    )
    requests_in_flight: int = Field(
        default=4,
        ge=1,
        description="Replayed requests that are kept open; in the last step no more than the"
        " release's schedule drafts for.",
    )
    max_tokens: int = Field(
        default=48,
        ge=1,
        description="Longest answer to a replayed request, in tokens.",
    )
    max_error_share: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="Share of the candidate's requests that may fail, those that the splitter then"
        " gave to the baseline included; more is unhealthy at once.",
    )
    min_acceptance_share: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Share of the gate's acceptance length that the candidate must show in each"
        " step that is judged by it.",
    )
    min_draft_coverage: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of the candidate's tokens that must come from target steps with a"
        " draft; not judged where the release's schedule drafts nothing at some load.",
    )
    max_latency_ratio: float = Field(
        default=3.0,
        gt=0,
        description="Most that the 95th percentile of the candidate's latency may be, as a"
        " multiple of the baseline's in the same step.",
    )
    min_requests_for_statistics: int = Field(
        default=20,
        ge=2,
        description="Requests of the candidate below which a step is not judged by draft coverage,"
        " and of either arm below which it is not judged by latency.",
    )
    min_steps_for_acceptance: int = Field(
        default=100,
        ge=1,
        description="Target steps with a draft below which a step is not judged by acceptance.",
    )
