"""The objective that trains a drafter, by its algorithm."""

from __future__ import annotations

from typing import Any

from components.settings import TrainingSettings
from components.training.eagle3_objective import Eagle3Objective
from components.training.objective import BlockObjective


def build_objective(drafter: Any, settings: TrainingSettings) -> BlockObjective:
    """`Eagle3Objective` for an EAGLE-3 drafter, `BlockObjective` for DSpark and DFlash.

    Raises:
        ConfigError: the settings or the drafter do not fit the objective.
    """
    is_eagle3 = drafter.config.speculators_model_type == "eagle3"
    return Eagle3Objective(drafter, settings) if is_eagle3 else BlockObjective(drafter, settings)
