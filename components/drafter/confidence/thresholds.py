"""The threshold on a prefix's survival that gives most tokens for what a step costs. Pure numpy.

Shapes: N blocks, K draft positions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from components.contracts import PrefixThreshold
from components.errors import ConfigError


def best_threshold(
    survival_NK: ArrayLike,
    accepted_NK: ArrayLike,
    cost_ratio: float,
    *,
    valid_NK: ArrayLike | None = None,
) -> PrefixThreshold:
    """The threshold that maximises tokens per unit cost over the blocks, among all that differ on
    them.

    A step with threshold h schedules the drafts whose prefix survives with at least h, commits the
    accepted ones among them and the target's own token, and costs a target pass and `cost_ratio`
    for each scheduled draft:

        tokens_n(h) = 1 + #{k: survival_nk >= h and drafts 1..k accepted}
        cost_n(h)   = 1 + cost_ratio #{k: survival_nk >= h}
        maximise over h:  sum_n tokens_n(h) / sum_n cost_n(h)

    The quotient of sums is what a long run of steps gives per unit cost. With right scores and best
    quotient R, the best threshold is cost_ratio R: a draft pays where its chance of a token is
    worth what its price buys elsewhere (Dinkelbach, "On nonlinear fractional programming", 1967).
    Searched exactly in O(N K log N K): a threshold only matters where it passes a survival, so
    sorting them gives every quotient by running sums.

    Args:
        survival_NK: [N, K] probability that drafts 1..k are all accepted; not rising along k.
        accepted_NK: [N, K] whether draft k was accepted, given that the ones before it were.
        cost_ratio: price of one scheduled draft over that of the target pass alone, not negative.
        valid_NK: [N, K] slots that exist; None: all.

    Returns:
        The choice with its figures. Where no draft pays, the threshold lies above all survivals.

    Raises:
        ConfigError: a negative cost ratio, or arrays of different shape.
    """
    survival, accepted = np.asarray(survival_NK, float), np.asarray(accepted_NK, bool)
    valid = np.ones_like(accepted) if valid_NK is None else np.asarray(valid_NK, bool)
    if (
        survival.ndim != 2
        or not survival.shape == accepted.shape == valid.shape
        or not len(survival)
    ):
        raise ConfigError(
            "survivals and acceptances do not belong together", got=(survival.shape, accepted.shape)
        )
    if cost_ratio < 0:
        raise ConfigError("the price of a draft token", got=cost_ratio, expected="0 or more")

    num_blocks = len(survival)
    order = np.argsort(-survival[valid], kind="stable")
    scores = survival[valid][order]
    num_scheduled = np.arange(len(scores) + 1)
    num_accepted = np.concatenate(
        [[0], np.cumsum(np.logical_and.accumulate(accepted, axis=1)[valid][order])]
    )

    rates = (num_blocks + num_accepted) / (num_blocks + cost_ratio * num_scheduled)
    # Equal survivals are scheduled together, so only the last of them is a choice; to schedule
    # nothing always is one.
    is_choice = np.concatenate([[True], scores[1:] < scores[:-1], [True] * bool(len(scores))])
    best = int(np.flatnonzero(is_choice)[np.argmax(rates[is_choice])])
    return PrefixThreshold(
        cost_ratio=float(cost_ratio),
        threshold=_between(scores, best),
        tokens_per_cost=float(rates[best]),
        tokens_per_step=float(1 + num_accepted[best] / num_blocks),
        num_scheduled=float(best / num_blocks),
    )


def _between(scores: np.ndarray, num_scheduled: int) -> float:
    """Halfway between the last survival that is scheduled and the first that is not."""
    low = scores[num_scheduled] if num_scheduled < len(scores) else 0.0
    # Where nothing pays, a survival of 1 must stay below the threshold too.
    high = scores[num_scheduled - 1] if num_scheduled else max(1.0, np.nextafter(low, 2.0))
    middle = float((low + high) / 2)
    return middle if low < middle else float(high)
