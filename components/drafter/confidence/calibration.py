"""Calibration of the confidence head, so that a product of its scores is the probability that a
prefix is accepted.

The head says for each draft position k how likely draft k is accepted, given that the drafts before
it were. It is trained on the overlap of target and draft distribution, which is that probability
under rejection sampling. A greedy engine accepts a draft when it is the target's argmax, which
happens more or less often than the overlap says, and a head trained for minutes is over- or
underconfident besides. Sequential temperature scaling corrects both, position by position from k =
1, the positions before it fixed:

    S_k = S_{k-1} sigmoid(logit_k / t_k + b_k),  S_0 = 1
    (t_k, b_k) minimise  - mean( y_k log S_k + (1 - y_k) log(1 - S_k) ),  y_k = 1 where drafts 1..k
    are all accepted

The temperature is Guo et al.'s (arXiv:1706.04599). The bias makes it Platt scaling (1999); a
temperature alone leaves a score of one half where it is, and so cannot move the mean from one event
to the other: on the demo's drafter it leaves an ECE of 0.020, with the bias it is 0.006
(docs/lab-notes/drafter.md).

Shapes: N blocks, K draft positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.special import log_expit

from components.contracts import Calibration, ReliabilityFigures
from components.drafter.confidence.reliability import NUM_BINS, reliability_figures
from components.drafter.confidence.thresholds import best_threshold
from components.errors import ConfigError, TrainingError

GREEDY_PREFIX_MATCH = "drafts 1..k all equal the target's argmax"
"""The event at temperature 0; what a survival is the probability of unless the caller brings
another.
"""

COST_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
"""Prices of a draft token that a calibration carries thresholds for: from an idle accelerator,
where verifying one more token is nearly free, to one so busy that it costs as much as a step of its
own.
"""

MIN_EVENTS = 10
"""Accepted prefixes, and refused ones, that a position needs to be fitted; with fewer, two
parameters fit noise.
"""

MAX_TEMPERATURE = 20.0
"""And least temperature's inverse. Bounds what a head that knows nothing is fitted to."""

MAX_BIAS = 10.0

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def survival(logits_NK: ArrayLike, calibration: Calibration | None = None) -> Array:
    """Probability that drafts 1..k are all accepted, float [N, K], not rising along k.

    Args:
        logits_NK: [N, K] of the confidence head.
        calibration: None takes the logits as they are.

    Raises:
        ConfigError: no matrix, or more positions than the calibration knows.
    """
    logits = np.asarray(logits_NK, float)
    if logits.ndim != 2:
        raise ConfigError(
            "confidence logits", got=f"shape {logits.shape}", expected="[blocks, draft positions]"
        )

    scaling = _Scaling.identity(logits.shape[1])
    if calibration is not None:
        scaling = _Scaling(np.array(calibration.temperatures), np.array(calibration.biases))

    if logits.shape[1] > len(scaling.temperatures_K):
        raise ConfigError(
            "the calibration has fewer draft positions than the logits",
            got=f"{len(scaling.temperatures_K)} positions",
            expected=f"at least {logits.shape[1]}",
            fix="Calibrate with the drafter's own block size.",
        )

    return scaling.survival(logits)


def fit_calibration(
    logits_NK: ArrayLike,
    accepted_NK: ArrayLike,
    conversations_N: ArrayLike,
    *,
    valid_NK: ArrayLike | None = None,
    event: str = GREEDY_PREFIX_MATCH,
    with_bias: bool = True,
    num_folds: int = 5,
    num_bins: int = NUM_BINS,
    cost_ratios: Sequence[float] = COST_RATIOS,
    seed: int = 0,
    target_weights: str | None = None,
) -> Calibration:
    """Fit temperatures (and biases) on held-out blocks, and measure them on blocks they were not
    fitted on.

    Cross-fitting by conversation, because blocks of one conversation overlap and are alike:
    conversations are dealt to `num_folds` folds, each fold's blocks are scored by parameters fitted
    on all other folds, and the figures are of these scores. The parameters that are kept are fitted
    on all blocks, so they are, if anything, better than measured.

    A position with fewer than MIN_EVENTS accepted or refused prefixes keeps temperature 1 and bias
    0, and `is_fitted` says so. With one conversation nothing can be measured and nothing is fitted.

    Args:
        logits_NK: [N, K] of the confidence head, where valid.
        accepted_NK: [N, K] whether draft k was accepted, given that the ones before it were; any
            event of that form, as greedy match or a draw of rejection sampling.
        conversations_N: [N] conversation of each block, any labels.
        valid_NK: [N, K] slots that exist, none after one that does not; None: all.
        event: of `accepted_NK`, for the record.
        with_bias: False fits temperatures alone.
        num_folds: at most one per conversation.
        num_bins: of the ECE.
        cost_ratios: prices of a draft token to find thresholds for, rising.
        seed: of the deal of conversations.
        target_weights: of the target whose acceptance this is, for the record.

    Raises:
        TrainingError: no valid block, arrays of different shape, or a logit that is not finite.
    """
    data = _Blocks.checked(logits_NK, accepted_NK, conversations_N, valid_NK)
    folds_N = _folds(data.conversations_N, num_folds, seed)
    num_used_folds = int(folds_N.max()) + 1
    identity = _Scaling.identity(data.logits_NK.shape[1])
    is_measurable = num_used_folds > 1
    scaling, is_fitted = (
        _fit(data, with_bias=with_bias) if is_measurable else (identity, (False,) * identity.size)
    )

    before_NK = identity.survival(data.logits_NK)
    after_NK = _cross_fitted(data, folds_N, with_bias=with_bias) if is_measurable else before_NK
    before, before_by_position = _figures(data, before_NK, num_bins)
    after, after_by_position = _figures(data, after_NK, num_bins)
    return Calibration(
        event=event,
        temperatures=tuple(scaling.temperatures_K.tolist()),
        biases=tuple(scaling.biases_K.tolist()),
        is_fitted=is_fitted,
        num_blocks=len(data.logits_NK),
        num_conversations=len(np.unique(data.conversations_N)),
        num_folds=num_used_folds if is_measurable else 0,
        before=before,
        after=after,
        before_by_position=before_by_position,
        after_by_position=after_by_position,
        thresholds=tuple(
            best_threshold(after_NK, data.accepted_NK, ratio, valid_NK=data.valid_NK)
            for ratio in cost_ratios
        ),
        target_weights=target_weights,
    )


def _cross_fitted(
    data: _Blocks, folds_N: NDArray[np.int64], *, with_bias: bool
) -> NDArray[np.float64]:
    """[N, K] survivals, each block's by parameters fitted on the other folds."""
    survival_NK = np.empty_like(data.logits_NK)
    for fold in range(int(folds_N.max()) + 1):
        others, _ = _fit(data.where(folds_N != fold), with_bias=with_bias)
        survival_NK[folds_N == fold] = others.survival(data.logits_NK[folds_N == fold])
    return survival_NK


@dataclass(frozen=True)
class _Scaling:
    """Temperatures and biases by position."""

    temperatures_K: Array
    biases_K: Array

    @classmethod
    def identity(cls, num_positions: int) -> _Scaling:
        return cls(np.ones(num_positions), np.zeros(num_positions))

    @property
    def size(self) -> int:
        return len(self.temperatures_K)

    def survival(self, logits_NK: Array) -> Array:
        num = logits_NK.shape[1]
        # Summed logarithms: a product of many small factors would vanish before its order is lost.
        log_NK = log_expit(logits_NK / self.temperatures_K[:num] + self.biases_K[:num]).cumsum(
            axis=1
        )
        return np.asarray(np.exp(log_NK))


@dataclass(frozen=True)
class _Blocks:
    """`accepted_NK` and `survived_NK` (drafts 1..k all accepted) mean something where
    `valid_NK`.
    """

    logits_NK: Array
    accepted_NK: Mask
    survived_NK: Mask
    valid_NK: Mask
    conversations_N: NDArray[np.generic]

    @classmethod
    def checked(
        cls,
        logits_NK: ArrayLike,
        accepted_NK: ArrayLike,
        conversations_N: ArrayLike,
        valid_NK: ArrayLike | None,
    ) -> _Blocks:
        logits, accepted = np.asarray(logits_NK, float), np.asarray(accepted_NK, bool)
        valid = np.ones(logits.shape, bool) if valid_NK is None else np.asarray(valid_NK, bool)
        conversations = np.asarray(conversations_N)
        if (
            logits.ndim != 2
            or not logits.shape == accepted.shape == valid.shape
            or conversations.ndim != 1
        ):
            raise TrainingError(
                "logits, acceptances and validity of blocks do not belong together",
                got=(logits.shape, accepted.shape, valid.shape, conversations.shape),
                expected="[N, K] each, and [N] conversations",
            )
        if (
            len(conversations) != len(logits)
            or not valid.any()
            or (valid[:, 1:] & ~valid[:, :-1]).any()
        ):
            raise TrainingError(
                "blocks that cannot be calibrated on",
                got=f"{len(logits)} blocks of {len(conversations)} conversations, "
                f"{int(valid.sum())} valid slots",
                expected="a conversation per block, and valid slots that begin at position 1 "
                "without a gap",
            )
        if not np.isfinite(logits[valid]).all():
            raise TrainingError(
                "a confidence logit is not finite",
                got=float(logits[valid][~np.isfinite(logits[valid])][0]),
            )

        survived = np.logical_and.accumulate(accepted, axis=1)
        return cls(np.where(valid, logits, 0.0), accepted, survived, valid, conversations)

    def where(self, chosen_N: Mask) -> _Blocks:
        return _Blocks(
            self.logits_NK[chosen_N],
            self.accepted_NK[chosen_N],
            self.survived_NK[chosen_N],
            self.valid_NK[chosen_N],
            self.conversations_N[chosen_N],
        )


def _folds(conversations_N: NDArray[np.generic], num_folds: int, seed: int) -> NDArray[np.int64]:
    """Fold of each block, 0 .. folds - 1: conversations dealt in a shuffled order."""
    labels, index_N = np.unique(conversations_N, return_inverse=True)
    dealt = np.random.default_rng(seed).permutation(len(labels)) % max(1, num_folds)
    return np.asarray(dealt[index_N])


def _fit(data: _Blocks, *, with_bias: bool) -> tuple[_Scaling, tuple[bool, ...]]:
    """Position by position; each position's survival becomes the fixed factor of the next."""
    num_positions = data.logits_NK.shape[1]
    scaling = _Scaling.identity(num_positions)
    is_fitted = []
    log_before_N = np.zeros(len(data.logits_NK))

    for k in range(num_positions):
        valid_N, logits_N, survived_N = (
            data.valid_NK[:, k],
            data.logits_NK[:, k],
            data.survived_NK[:, k],
        )
        num_survived = int(survived_N[valid_N].sum())
        is_fitted.append(MIN_EVENTS <= num_survived <= int(valid_N.sum()) - MIN_EVENTS)
        if is_fitted[-1]:
            scaling.temperatures_K[k], scaling.biases_K[k] = _fit_position(
                logits_N[valid_N], log_before_N[valid_N], survived_N[valid_N], with_bias=with_bias
            )
        log_before_N += log_expit(logits_N / scaling.temperatures_K[k] + scaling.biases_K[k])

    return scaling, tuple(is_fitted)


def _fit_position(
    logits_N: Array, log_before_N: Array, survived_N: Mask, *, with_bias: bool
) -> tuple[float, float]:
    """Temperature and bias of least negative log-likelihood, by L-BFGS-B on (log t, b) from (0, 0).

    The search never accepts a worse point, so the fit is at least as likely as no calibration.
    """
    with np.errstate(divide="ignore"):
        log_lost_N = np.log(-np.expm1(log_before_N))  # log(1 - S_{k-1}), -inf at S = 1

    def loss(point: Array) -> tuple[float, Array]:
        scale = np.exp(-point[0])
        z_N = logits_N * scale + point[1]
        log_yes_N, log_no_N = log_expit(z_N), log_expit(-z_N)
        # 1 - S sigmoid(z) = (1 - S) + S sigmoid(-z), without the cancellation where both factors
        # are near 1.
        log_refused_N = np.logaddexp(log_lost_N, log_before_N + log_no_N)
        value_N = np.where(survived_N, log_yes_N, log_refused_N)
        fall_N = np.exp(log_before_N + log_yes_N + log_no_N - log_refused_N)
        slope_N = np.where(survived_N, np.exp(log_no_N), -fall_N)
        return -float(value_N.mean()), -np.array(
            [(slope_N * logits_N).mean() * -scale, slope_N.mean()]
        )

    limit = float(np.log(MAX_TEMPERATURE))
    bias = MAX_BIAS if with_bias else 0.0
    found = minimize(
        loss, np.zeros(2), jac=True, method="L-BFGS-B", bounds=[(-limit, limit), (-bias, bias)]
    )
    return float(np.exp(found.x[0])), float(found.x[1])


def _figures(
    data: _Blocks, survival_NK: Array, num_bins: int
) -> tuple[ReliabilityFigures, tuple[ReliabilityFigures, ...]]:
    """Of all valid slots together, and by position as far as there are any."""
    valid_NK, survived_NK = data.valid_NK, data.survived_NK
    by_position = tuple(
        reliability_figures(survival_NK[valid_N, k], survived_NK[valid_N, k], num_bins=num_bins)
        for k, valid_N in enumerate(valid_NK.T)
        if valid_N.any()
    )
    return reliability_figures(
        survival_NK[valid_NK], survived_NK[valid_NK], num_bins=num_bins
    ), by_position
