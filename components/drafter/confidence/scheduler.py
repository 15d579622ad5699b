"""How many of a block's drafts are worth verifying: those whose prefix is likely enough to be
accepted.

Shapes: N blocks, K draft positions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from components.contracts import Calibration
from components.drafter.confidence.calibration import survival
from components.errors import ConfigError


class PrefixScheduler:
    """Schedules drafts 1..k while the survival of the prefix, the product of their confidences, is
    high enough.

    Args:
        threshold: least survival of a prefix that is still scheduled. 0 schedules all drafts, above
            1 none; `for_cost_ratio` takes the best one.
        calibration: of the drafter's confidence head; None takes its logits as they are.

    Raises:
        ConfigError: the threshold is negative or not a number.
    """

    def __init__(self, threshold: float, calibration: Calibration | None = None) -> None:
        if not threshold >= 0.0:
            raise ConfigError(
                "the scheduler's threshold is a probability", got=threshold, expected="0 or more"
            )
        self.threshold = threshold
        self.calibration = calibration

    @classmethod
    def for_cost_ratio(cls, calibration: Calibration, cost_ratio: float) -> PrefixScheduler:
        """The scheduler of most tokens per unit cost, a target pass costing 1 and each draft token
        `cost_ratio`.

        Between the cost ratios that the calibration has thresholds for, the threshold is
        interpolated linearly.

        Raises:
            ConfigError: the cost ratio lies outside those of the calibration.
        """
        ratios = [choice.cost_ratio for choice in calibration.thresholds]
        if not ratios or not ratios[0] <= cost_ratio <= ratios[-1]:
            raise ConfigError(
                "the calibration has no threshold for this cost ratio",
                got=cost_ratio,
                expected=f"{ratios[0]:g} to {ratios[-1]:g}"
                if ratios
                else "a calibration with thresholds",
                fix="Find one with best_threshold on held-out blocks, and pass it as the "
                "threshold.",
            )

        threshold = np.interp(
            cost_ratio, ratios, [choice.threshold for choice in calibration.thresholds]
        )
        return cls(float(threshold), calibration)

    def num_scheduled(self, confidence_logits_NK: ArrayLike) -> NDArray[np.int64]:
        """Drafts to verify per block, int [N], 0 to K: all before the first whose prefix survives
        too rarely.

        Args:
            confidence_logits_NK: [N, K] of the confidence head, as drafted.

        Raises:
            ConfigError: the calibration knows fewer positions than K.
        """
        return np.asarray(
            (survival(confidence_logits_NK, self.calibration) >= self.threshold).sum(axis=1)
        )
