"""Speed-up over the interleaved rounds of two arms, with its uncertainty. Pure.

**Unit.** A round: at one load both arms answer the same prompts within moments, so what the machine
does meanwhile and how long those answers are hits both alike and leaves their ratio. Rounds send
different prompts, so the rounds also say how far the speed-up differs from prompts to prompts.

**Interval.** Student's t of the mean log ratio, n - 1 degrees of freedom for n rounds: exact where
log ratios are normal. The speed-up is the geometric mean of the rounds' ratios. Rounds that agree
by chance, or because their figures were rounded or made up, are no certainty: one round's log ratio
is taken to spread by no less than `MIN_ROUND_SPREAD`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from components.evaluation.statistics.estimate import Estimate
from components.evaluation.statistics.power import prompts_needed

MIN_ROUND_SPREAD = 0.02
"""Standard deviation of one round's log ratio, at the least: the medians of five rounds of 48
prompts on one engine still differed by 1.7 % from noise alone (docs/lab-notes/gate.md, what
measuring costs).
"""


def estimate_speedup(ours: Sequence[float], theirs: Sequence[float]) -> Estimate | None:
    """Throughput of one arm over another's.

    Args:
        ours: [R] tok/s of each round.
        theirs: [R] of the other arm, in the same rounds.

    Returns:
        None with fewer than two rounds, unlike numbers of rounds, or a round that is not a positive
        number.
    """
    logs = log_ratios(ours, theirs)
    if len(logs) < 2:
        return None
    spread = max(float(np.std(logs, ddof=1)), MIN_ROUND_SPREAD)
    return _estimate(float(np.mean(logs)), spread / math.sqrt(len(logs)), len(logs))


def log_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """[R] paired log ratios of rounds; empty where rounds do not pair up or hold anything but
    positive numbers.
    """
    if len(ours) != len(theirs) or not all(
        math.isfinite(rate) and rate > 0 for rate in (*ours, *theirs)
    ):
        return []
    return [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]


def rounds_needed(
    ours: Sequence[float], theirs: Sequence[float], limit: float, *, alpha: float
) -> int | None:
    """Number of rounds, those measured included, that decides on which side of `limit` the speed-up
    lies in 4 of 5.

    One round shows no spread: what it names is the least, that of rounds as alike as
    `MIN_ROUND_SPREAD`.

    Returns:
        None without a usable round, or where no number up to a million does.
    """
    logs = log_ratios(ours, theirs)
    if not logs:
        return None
    if len(logs) == 1:
        return prompts_needed(
            _estimate(logs[0], MIN_ROUND_SPREAD / math.sqrt(2), 2), limit, alpha=alpha
        )
    return prompts_needed(estimate_speedup(ours, theirs), limit, alpha=alpha)


def _estimate(log_value: float, standard_error: float, num_rounds: int) -> Estimate:
    return Estimate(
        math.exp(log_value), 0.0, log_value, standard_error, num_rounds - 1.0, num_rounds
    )
