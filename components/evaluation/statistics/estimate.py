"""An estimate with its uncertainty: interval, one-sided tests, verdict against a threshold. Pure.

How prompts and rounds become one is in `statistics.py` and `rounds.py`. The ends go further by the
Cornish-Fisher term of a studentised mean on the side the deviations lean to (P. Hall, "The
Bootstrap and Edgeworth Expansion", 1992, section 2.6).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr, stdtrit

from components.contracts import Verdict

Array = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A value with its uncertainty on the log scale: value = origin + exp(log_value).

    A value at its origin has no log: nothing was counted in `num_trials` trials (accepted in so
    many steps). Its tests are those of a Poisson count of zero: were the truth at a threshold, none
    would be seen with probability exp(-(threshold - origin) num_trials), which is no less than the
    binomial's.

    Raises:
        ValueError: a standard error of zero or less, which no measurement has.
    """

    value: float
    origin: float
    log_value: float
    standard_error: float
    """Of `log_value`; 0 for a value at its origin only."""
    degrees_of_freedom: float
    num_prompts: int
    """Or rounds: the units that vary."""

    skewness: float = 0.0
    """Of the estimate's own distribution on the log scale: how much further the end on that side
    goes.
    """
    num_trials: float = 0.0
    """Behind a value at its origin: steps or drafts in which nothing was counted."""

    def __post_init__(self) -> None:
        if self.at_origin:
            if self.num_trials <= 0:
                raise ValueError(
                    "an estimate at its origin needs the trials in which nothing was counted"
                )
        elif self.standard_error <= 0:
            raise ValueError(
                f"no measurement is certain: standard error {self.standard_error:g}, expected "
                "above 0"
            )

    @property
    def at_origin(self) -> bool:
        """Nothing at all was counted, so there is no log and no spread."""
        return self.log_value == -math.inf

    def interval(self, confidence: float = 0.95) -> Interval:
        """Two-sided Student's t interval, back on the natural scale; of a value at its origin the
        Poisson one.
        """
        level = (1 + confidence) / 2
        if self.at_origin:
            return (self.origin, self.origin - math.log1p(-level) / self.num_trials)
        low = self.log_value - self._reach(level, -self.skewness) * self.standard_error
        high = self.log_value + self._reach(level, self.skewness) * self.standard_error
        # Beyond 700 the exponential is more than a float can hold: such an interval has no end.
        return (
            self.origin + math.exp(low),
            self.origin + (math.exp(high) if high < 700 else math.inf),
        )

    def p_above(self, threshold: float) -> float:
        """One-sided p of "the true value is at most `threshold`": small when it is above."""
        if self.at_origin:
            return 1.0 if threshold > self.origin else 0.0
        return self._p(self._distance(threshold), -self.skewness)

    def p_below(self, threshold: float) -> float:
        """One-sided p of "the true value is at least `threshold`": small when it is below."""
        if self.at_origin:
            return math.exp(-max(0.0, threshold - self.origin) * self.num_trials)
        return self._p(-self._distance(threshold), self.skewness)

    def _p(self, distance: float, skewness: float) -> float:
        """One less the level whose end, on the side of `skewness`, lies `distance` standard errors
        away.
        """
        if skewness <= 0 or math.isinf(distance):
            return float(stdtr(self.degrees_of_freedom, -distance))
        if distance <= self._reach(0.5, skewness):
            return max(0.5, float(stdtr(self.degrees_of_freedom, -distance)))
        low, high = 0.5, 1.0  # by bisection
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if self._reach(middle, skewness) < distance else (low, middle)
            )
        return 1.0 - low

    def _reach(self, level: float, skewness: float) -> float:
        """Standard errors from the estimate to an end of one-sided level `level`, 0.5 or more, on
        the skewed side.
        """
        reach = float(stdtrit(self.degrees_of_freedom, level))
        return reach + skewness * (2 * float(ndtri(level)) ** 2 + 1) / 6 if skewness > 0 else reach

    def _distance(self, threshold: float) -> float:
        """From the threshold, in standard errors; nothing lies below the origin."""
        if threshold <= self.origin:
            return math.inf
        return (self.log_value - math.log(threshold - self.origin)) / self.standard_error


def threshold_verdict(estimate: Estimate | None, threshold: float, *, alpha: float) -> Verdict:
    """Pass when the value is shown to be at or above `threshold`, fail when below, each one-sided
    at level `alpha`.
    """
    if estimate is None or not math.isfinite(estimate.value):
        return Verdict.INCONCLUSIVE
    if estimate.p_above(threshold) <= alpha:
        return Verdict.PASS
    return Verdict.FAIL if estimate.p_below(threshold) <= alpha else Verdict.INCONCLUSIVE
