"""The rules of the gate."""

from __future__ import annotations

from pydantic import Field

from components.contracts import RequestFeature
from components.settings.base import Settings


class GateSettings(Settings):
    """Rules a candidate must pass before it may be released.

    Levels are one-sided; what they bound is written down in `components/evaluation/statistics`.
    They hold over all looks at a candidate together: each look spends its part
    (`components/evaluation/rules/looks.py`).
    """

    min_acceptance_length: float = Field(
        default=1.2,
        ge=1,
        description="Tokens per target step, bonus token included, that the candidate must be"
        " shown to reach over all slices, at level `alpha`.",
    )
    min_sampled_acceptance_length: float | None = Field(
        default=None,
        ge=1,
        description="The same limit at each further temperature of `evaluation.temperatures`; null"
        " reports those lengths and makes no rule of them.",
    )
    non_inferiority_margin: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Relative loss of acceptance length against the champion, on each slice, that"
        " is not called worse; a larger one can be decided with fewer prompts.",
    )
    non_inferiority_alpha: float = Field(
        default=0.005,
        gt=0,
        lt=0.5,
        description="Level of each slice's test over all looks together: a drafter worse by the"
        " margin there passes at most about as often, up to twice as often where prompts are"
        " heavy-tailed.",
    )
    alpha: float = Field(
        default=0.025,
        gt=0,
        lt=0.5,
        description="Level of every other claim over all looks together, fails and the speed-up"
        " included.",
    )
    min_prompts_per_slice: int = Field(
        default=8,
        ge=2,
        description="A slice with fewer prompts that had a draft is never a pass, nor is a rule"
        " over all slices together with fewer in all.",
    )
    require_superiority: bool = Field(
        default=False,
        description="Whether the candidate must be shown to be better than the champion over all"
        " slices; otherwise that is told for information.",
    )
    max_further_prompts: int = Field(
        default=500,
        ge=0,
        description="Prompts up to which an inconclusive rule asks for more; one that needs more"
        " than these says that it lies beyond the limit.",
    )
    min_position_acceptance: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the drafts at a position, of those accepted before it, that must be"
        " accepted. The first position must be shown to reach it; a later one fails where it is"
        " shown to fall short.",
    )
    max_position_loss: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Relative loss of that share against the champion's that fails the candidate"
        " where it is shown at any position.",
    )
    min_draft_coverage: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="Share of output tokens that must come from target steps with a draft; less"
        " means that the drafter is not at work.",
    )
    serving_requests_in_flight: int = Field(
        default=1,
        ge=1,
        description="Load, in requests in flight, that `min_speedup` is about; it must be among"
        " `evaluation.speed_requests_in_flight` unless that is null.",
    )
    min_speedup: float | None = Field(
        default=1.0,
        gt=0,
        description="Least tokens per second over no draft at `serving_requests_in_flight`, shown"
        " over interleaved rounds at level `alpha`. At 1, a drafter that is slower than none is no"
        " pass; null tells the speed and makes no rule of it.",
    )
    max_train_served_gap: float | None = Field(
        default=None,
        ge=0,
        description="Largest relative difference of the teacher-forced and the reference-decoded"
        " acceptance length from the served one. Null does not measure it, which saves running the"
        " target once more beside the engines.",
    )
    max_memory_growth: float | None = Field(
        default=None,
        ge=0,
        description="Largest growth of an engine's peak memory by the candidate, as a share of no"
        " draft's (0.2 is a fifth more); memory of a GPU is not counted. Null makes no rule.",
    )
    losslessness_alpha: float = Field(
        default=0.005,
        gt=0,
        lt=0.5,
        description="Chance that a drafter whose outputs are the target's own fails the comparison"
        " of outputs with the plain engine, whatever share of outputs the machine's own rounding"
        " changes. A whole rollout's check of its outputs errs with the same chance.",
    )
    required_requests: tuple[RequestFeature, ...] = Field(
        default=("n", "logprobs", "stop", "json_schema", "end_of_context", "stream"),
        description="Kinds of request that the engine must still serve with the candidate where it"
        " does without a drafter; others that are lost are told for information.",
    )
    bootstrap_samples: int = Field(
        default=2000,
        ge=100,
        description="Resamples behind each BCa interval, which is shown beside the one that"
        " decides.",
    )
    seed: int = Field(
        default=0,
        description="Seed of the bootstrap and of the permutation test on draws: the same report"
        " always gets the same decision.",
    )
