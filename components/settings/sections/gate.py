"""The rules of the gate."""

from __future__ import annotations

from pydantic import Field

from components.contracts import RequestFeature
from components.settings.base import Settings


class GateSettings(Settings):
    """Rules a candidate must pass. Levels are one-sided; what they bound is in
    evaluation/statistics.py.

    They hold over all looks at a candidate together: each spends its part (evaluation/looks.py).
    """

    min_acceptance_length: float = Field(default=1.2, ge=1)
    min_sampled_acceptance_length: float | None = Field(
        default=None, ge=1, description="at each further temperature; None: reported, no rule"
    )
    non_inferiority_margin: float = Field(
        default=0.05, ge=0, lt=1, description="relative, against the champion, per slice"
    )
    non_inferiority_alpha: float = Field(
        default=0.005,
        gt=0,
        lt=0.5,
        description="Level of each slice's test over all looks together: a drafter worse by the "
        "margin there passes at"
        " most about as often, up to twice as often where prompts are heavy-tailed.",
    )
    alpha: float = Field(
        default=0.025,
        gt=0,
        lt=0.5,
        description="Level of every other claim over all looks together, fails and the speed-up "
        "included.",
    )
    min_prompts_per_slice: int = Field(
        default=8,
        ge=2,
        description="A slice with fewer prompts that had a draft is never a pass, nor is a rule "
        "over all slices"
        " together with fewer in all.",
    )
    require_superiority: bool = Field(
        default=False, description="over all slices against the champion, to pass"
    )
    max_further_prompts: int = Field(
        default=500, ge=0, description="budget for deciding an inconclusive rule"
    )
    min_position_acceptance: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="share accepted at a draft position of those accepted before it",
    )
    max_position_loss: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="of that share against the champion's, relative, at any position",
    )
    min_draft_coverage: float = Field(default=0.9, ge=0, le=1)
    serving_concurrency: int = Field(
        default=1, ge=1, description="requests in flight that min_speedup is about"
    )
    min_speedup: float | None = Field(
        default=1.0,
        gt=0,
        description="Least tok/s over no draft at serving_concurrency, shown over interleaved "
        "rounds at level alpha."
        " At 1, a drafter that is slower than none is no pass; None: speed is told and no rule.",
    )
    max_train_served_gap: float | None = Field(
        default=None,
        ge=0,
        description="relative difference of teacher-forced and reference-decoded acceptance "
        "length from the served one;"
        " None: not measured",
    )
    max_memory_growth: float | None = Field(
        default=None,
        ge=0,
        description="peak memory of the candidate's engine over no draft's, less 1; None: no rule",
    )
    losslessness_alpha: float = Field(
        default=0.005,
        gt=0,
        lt=0.5,
        description="Chance that a drafter whose outputs are the target's own fails the "
        "comparison of outputs with the"
        " plain engine, whatever share of outputs the machine's own rounding changes.",
    )
    required_requests: tuple[RequestFeature, ...] = Field(
        default=("n", "logprobs", "stop", "json_schema", "end_of_context", "stream"),
        description="Kinds of request that the engine must still serve with the candidate where "
        "it does"
        " without a drafter; others that are lost are told for information.",
    )
    bootstrap_samples: int = Field(
        default=2000, ge=100, description="resamples behind each BCa interval"
    )
    seed: int = Field(
        default=0, description="of the bootstrap: the same report always gets the same decision"
    )
