"""How many prompts, or rounds, a decision needs, from the variance already seen. Pure.

If the true value is the one observed, a test at level alpha with N prompts decides with probability
P(t'(df_N, delta_N) >= t(1 - alpha, df_N)), t' the noncentral t of noncentrality delta_N = distance
sqrt(N) / sigma (S. Julious, "Sample sizes for clinical trials with Normal data", Statistics in
Medicine 23, 2004), where `distance` is from the threshold on the log scale and sigma = standard
error sqrt(n) the observed spread of one (paired) prompt. What is named will be judged at the next
look, so callers pass that look's level (`looks.next_level`).
"""

from __future__ import annotations

import math

from scipy import stats

from components.evaluation.statistics.estimate import Estimate

MAX_PROMPTS = 1_000_000
"""Beyond this the distance to the threshold is nothing that measuring decides."""


def power(estimate: Estimate, threshold: float, *, num_prompts: int, alpha: float) -> float:
    """Probability that `num_prompts` prompts decide on which side of `threshold` the observed value
    lies.

    A value at its origin stays there: it decides, with certainty, once a Poisson count of zero
    would.
    """
    if threshold <= estimate.origin:
        return 1.0
    if estimate.at_origin:
        return float(estimate.p_below(threshold) ** (num_prompts / estimate.num_prompts) <= alpha)

    spread = estimate.standard_error * math.sqrt(estimate.num_prompts)
    distance = abs(estimate.log_value - math.log(threshold - estimate.origin))
    degrees = estimate.degrees_of_freedom * (num_prompts - 1) / (estimate.num_prompts - 1)
    noncentrality = distance * math.sqrt(num_prompts) / spread
    quantile = float(stats.t.ppf(1 - alpha, degrees))
    # Far beyond any power below one, where scipy's series no longer converges.
    if noncentrality > 30:
        return 1.0

    return float(stats.nct.sf(quantile, degrees, noncentrality))


def prompts_needed(
    estimate: Estimate | None, threshold: float, *, alpha: float, target_power: float = 0.8
) -> int | None:
    """Smallest number of prompts, those measured included, that decides with probability
    `target_power`.

    Returns:
        None when there is no estimate (one prompt shows no spread), or no number up to a million
        does.
    """
    if estimate is None or not math.isfinite(estimate.value):
        return None

    def decides(num_prompts: int) -> bool:
        return power(estimate, threshold, num_prompts=num_prompts, alpha=alpha) >= target_power

    enough = estimate.num_prompts
    while not decides(enough):
        if enough >= MAX_PROMPTS:
            return None
        enough *= 2
    short = max(estimate.num_prompts, enough // 2)
    if enough == estimate.num_prompts:
        return enough
    while enough - short > 1:
        middle = (short + enough) // 2
        short, enough = (short, middle) if decides(middle) else (middle, enough)
    return enough
