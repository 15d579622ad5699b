"""The learning rate over a run whose end is set by steps, data or time, whichever comes first."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up, then cosine to zero, over the share of the run that is done.

    The share is the largest of steps, samples and time, so the rate reaches zero by the end even
    where a deadline cuts the run short of its data.
    """

    learning_rate: float
    warmup_share: float
    num_samples: int
    num_steps: int | None
    max_trainer_s: float | None

    def share_done(self, *, step: int, num_consumed: int, elapsed_s: float) -> float:
        """How much of the run is done, 0 to 1."""
        shares = [num_consumed / max(1, self.num_samples)]
        if self.num_steps is not None:
            shares.append(step / self.num_steps)
        if self.max_trainer_s is not None:
            shares.append(elapsed_s / self.max_trainer_s)
        return min(1.0, max(shares))

    def rate(self, share: float) -> float:
        """Learning rate at a share of the run."""
        if share < self.warmup_share:
            # A share of zero would waste the first step.
            return self.learning_rate * max(share / self.warmup_share, 0.1)
        after = (share - self.warmup_share) / (1 - self.warmup_share)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * after))

    def stopped_by(self, *, step: int, elapsed_s: float) -> str | None:
        """'steps' or 'time' once that limit is reached."""
        if self.num_steps is not None and step >= self.num_steps:
            return "steps"
        if self.max_trainer_s is not None and elapsed_s >= self.max_trainer_s:
            return "time"
        return None
