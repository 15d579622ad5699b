"""How well predicted probabilities fit what happened. Pure: numpy and scipy.

Expected calibration error (Naeini et al., "Obtaining Well Calibrated Probabilities Using Bayesian
Binning", AAAI 2015; Guo et al., arXiv:1706.04599), with s a score and y in {0, 1} its outcome, over
bins B of n_B of all n scores:

    ECE = sum_B n_B / n |mean_B s - mean_B y|

Bins hold equally many scores, not equal widths: survivals of late positions crowd near 0, where
equal widths would put most of them into one bin and hide their errors in its mean.

The ECE of right scores is not 0: a bin's accepted share scatters by sqrt(sum s (1 - s)) / n_B.
`ece_floor` is what that alone makes to expect, so an ECE at its floor cannot be told from a perfect
one. With 15 bins and scores spread evenly over 0 to 1 it is 0.038 for 1,024 independent scores,
0.014 for 8,192 and 0.0085 for 20,000. Blocks of one conversation are alike, so the true floor is
somewhat higher.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from components.contracts import ReliabilityBin, ReliabilityFigures
from components.errors import TrainingError

NUM_BINS = 15
"""Of the ECE, as in Guo et al."""

NUM_HISTOGRAM_BINS = 40

Array = NDArray[np.float64]


def expected_calibration_error(
    scores_N: ArrayLike, outcomes_N: ArrayLike, *, num_bins: int = NUM_BINS
) -> float:
    """ECE over bins of equally many scores, 0 to 1; formula and sources above.

    Args:
        scores_N: [N] predicted probabilities.
        outcomes_N: [N] 0 or 1.
        num_bins: at most this many; equal scores share a bin, so there may be fewer.

    Raises:
        TrainingError: no scores, or arrays of different length.
    """
    scores, outcomes = _checked(scores_N, outcomes_N)
    count, score, outcome, _ = _bin_sums(scores, outcomes, num_bins)
    return float(np.abs(score - outcome).sum() / count.sum())


def expected_floor(scores_N: ArrayLike, *, num_bins: int = NUM_BINS) -> float:
    """The ECE to expect where every outcome is drawn, independently, with its score's probability.

    sum_B sqrt(2 / pi * sum_{i in B} s_i (1 - s_i)) / N: a bin's error is nearly normal, and E|x| of
    a centred normal is sqrt(2 / pi) times its standard deviation.
    """
    scores = np.asarray(scores_N, float)
    *_, variance = _bin_sums(scores, np.zeros_like(scores), num_bins)
    return float(np.sqrt(2 / np.pi * variance).sum() / len(scores))


def brier_score(scores_N: ArrayLike, outcomes_N: ArrayLike) -> float:
    """mean (s - y)^2, 0 to 1 (Brier, "Verification of forecasts expressed in terms of probability",
    1950).

    Raises:
        TrainingError: as `expected_calibration_error`.
    """
    scores, outcomes = _checked(scores_N, outcomes_N)
    return float(np.mean((scores - outcomes) ** 2))


def auc(scores_N: ArrayLike, outcomes_N: ArrayLike) -> float | None:
    """Probability that a positive has a higher score than a negative, ties counting one half; None
    without both.

    By ranks, mean rank among ties (Mann & Whitney 1947): (R_1 - n_1 (n_1 + 1) / 2) / (n_1 n_0).

    Raises:
        TrainingError: as `expected_calibration_error`.
    """
    scores, outcomes = _checked(scores_N, outcomes_N)
    is_positive = outcomes > 0.5
    num_positive = int(is_positive.sum())
    num_negative = len(scores) - num_positive
    if not num_positive or not num_negative:
        return None
    ranks = rankdata(scores)[is_positive].sum()
    return float((ranks - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def reliability_figures(
    scores_N: ArrayLike, outcomes_N: ArrayLike, *, num_bins: int = NUM_BINS
) -> ReliabilityFigures:
    """Everything that is reported and drawn of one set of scores.

    Raises:
        TrainingError: as `expected_calibration_error`.
    """
    scores, outcomes = _checked(scores_N, outcomes_N)
    count, score, outcome, _ = _bin_sums(scores, outcomes, num_bins)
    histogram, _ = np.histogram(scores, bins=NUM_HISTOGRAM_BINS, range=(0.0, 1.0))
    return ReliabilityFigures(
        num_scores=len(scores),
        mean_score=float(scores.mean()),
        accepted_share=float(outcomes.mean()),
        ece=expected_calibration_error(scores, outcomes, num_bins=num_bins),
        ece_floor=expected_floor(scores, num_bins=num_bins),
        brier=brier_score(scores, outcomes),
        auc=auc(scores, outcomes),
        bins=tuple(
            ReliabilityBin(mean_score=float(s / n), accepted_share=float(y / n), num_scores=int(n))
            for n, s, y in zip(count, score, outcome, strict=True)
        ),
        histogram=tuple(int(number) for number in histogram),
    )


def _bin_sums(scores: Array, outcomes: Array, num_bins: int) -> tuple[Array, Array, Array, Array]:
    """Per bin with scores, by rising score: how many, sum of scores, of outcomes, of s (1 - s)."""
    # By mean rank, not by place in a sort: equal scores share a bin, so the order of the blocks
    # cannot matter.
    bins = ((rankdata(scores) - 0.5) / len(scores) * num_bins).astype(int)
    used = np.bincount(bins, minlength=num_bins) > 0

    def total(values: Array) -> Array:
        return np.asarray(np.bincount(bins, weights=values, minlength=num_bins)[used])

    return total(np.ones_like(scores)), total(scores), total(outcomes), total(scores * (1 - scores))


def _checked(scores_N: ArrayLike, outcomes_N: ArrayLike) -> tuple[Array, Array]:
    scores, outcomes = np.asarray(scores_N, float), np.asarray(outcomes_N, float)
    if scores.ndim != 1 or scores.shape != outcomes.shape or not len(scores):
        raise TrainingError(
            "scores and outcomes do not belong together",
            got=(scores.shape, outcomes.shape),
            expected="equal, not empty",
        )
    return scores, outcomes
