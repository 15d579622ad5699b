"""The calibration of a drafter's confidence head, with how well its scores fit before and after."""

from __future__ import annotations

from pydantic import Field

from components.contracts.record import Record


class ReliabilityBin(Record):
    """Scores of about the same height, and what became of their prefixes."""

    mean_score: float
    accepted_share: float
    num_scores: int


class ReliabilityFigures(Record):
    """How well scores, each the predicted probability that a prefix of drafts is accepted, fit what
    happened.
    """

    num_scores: int
    mean_score: float
    accepted_share: float
    ece: float = Field(
        description="expected calibration error over `bins`, which hold equally many scores, 0 to 1"
    )
    ece_floor: float = Field(
        description="the ECE to be expected of right scores: what is left is sampling noise"
    )
    brier: float = Field(description="mean squared difference, 0 to 1")
    auc: float | None = Field(
        description="area under the ROC curve; None where all prefixes had the same fate"
    )
    bins: tuple[ReliabilityBin, ...] = Field(description="by rising score")
    histogram: tuple[int, ...] = Field(description="scores in equally wide bins over 0 to 1")


class PrefixThreshold(Record):
    """The threshold on a prefix's survival that gives most tokens for one price of a draft
    token.
    """

    cost_ratio: float = Field(
        description="price of one scheduled draft token over that of the target pass alone"
    )
    threshold: float = Field(
        description="a draft is scheduled while its prefix's survival is at least this, 0 to 1"
    )
    tokens_per_cost: float = Field(description="(sum of tokens) / (sum of costs); 1 without drafts")
    tokens_per_step: float = Field(description="the bonus token included")
    num_scheduled: float = Field(description="mean draft tokens per step")


class Calibration(Record):
    """Sequential temperature scaling of a confidence head: c_k = sigmoid(logit_k / temperature_k +
    bias_k).

    The product c_1 .. c_k is the survival of the first k drafts. Figures are of survivals, each
    scored by parameters fitted on other conversations; the parameters here are fitted on all of
    them.
    """

    event: str = Field(description="what a survival is the probability of")
    temperatures: tuple[float, ...] = Field(description="by draft position; 1 where not fitted")
    biases: tuple[float, ...] = Field(
        description="by draft position, in logits; 0 where not fitted or not asked for"
    )
    is_fitted: tuple[bool, ...] = Field(
        description="False: the position had too few events of one kind"
    )
    num_blocks: int
    num_conversations: int
    num_folds: int = Field(
        description="of the cross-fit by conversation; 0: too few conversations, nothing is fitted"
    )
    before: ReliabilityFigures = Field(description="all positions together, logits as they are")
    after: ReliabilityFigures
    before_by_position: tuple[ReliabilityFigures, ...]
    after_by_position: tuple[ReliabilityFigures, ...]
    thresholds: tuple[PrefixThreshold, ...] = Field(description="by rising cost ratio")
    target_weights: str | None = Field(
        default=None, description="fingerprint part of the target it was measured on"
    )
