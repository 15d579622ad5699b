"""How far a training run is, and what its steps since the last point of the curve come to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from components.training.job import CurvePoint, ValidationPoint
from components.training.objectives.block import BlockScores


@dataclass
class TrainingProgress:
    """Where a run is. Everything here is part of the state on disk."""

    step: int = 0
    elapsed_s: float = 0.0
    wait_s: float = 0.0
    num_tokens: int = 0
    num_consumed: int = 0
    best_acceptance: float = 0.0
    curve: list[CurvePoint] = field(default_factory=list)
    validation: list[ValidationPoint] = field(default_factory=list)

    def dump(self) -> dict[str, Any]:
        """JSON values."""
        plain = {
            name: value for name, value in vars(self).items() if name not in ("curve", "validation")
        }
        return plain | {
            "curve": [point.model_dump() for point in self.curve],
            "validation": [point.model_dump() for point in self.validation],
        }

    @classmethod
    def load(cls, dumped: dict[str, Any]) -> TrainingProgress:
        """The reverse of `dump`."""
        points = {
            "curve": [CurvePoint.model_validate(point) for point in dumped["curve"]],
            "validation": [ValidationPoint.model_validate(point) for point in dumped["validation"]],
        }
        return cls(**{**dumped, **points})


@dataclass
class Window:
    """Sums since the last curve point."""

    started_s: float
    waited_s: float
    num_steps: int = 0
    loss: float = 0.0
    accepted: float = 0.0
    expected: float = 0.0
    grad_norm: float = 0.0

    def add(self, scored: list[BlockScores], grad_norm: float) -> None:
        self.num_steps += 1
        for scores in scored:
            self.loss += float(scores.loss) / len(scored)
            self.accepted += (
                float(scores.match_NK.int().cumprod(1).sum(1).float().mean()) + 1
            ) / len(scored)
            self.expected += (float(scores.overlap_NK.cumprod(1).sum(1).mean()) + 1) / len(scored)
        self.grad_norm += grad_norm
