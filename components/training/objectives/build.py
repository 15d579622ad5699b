"""The objective that trains a drafter, by its algorithm."""

from __future__ import annotations

from components.drafter.protocol import Drafter
from components.settings import TrainingSettings
from components.training.objectives.block import BlockObjective
from components.training.objectives.eagle3 import Eagle3Objective


def build_objective(drafter: Drafter, settings: TrainingSettings) -> BlockObjective:
    """`Eagle3Objective` for an EAGLE-3 drafter, `BlockObjective` for DSpark and DFlash.

    Raises:
        ConfigError: the settings or the drafter do not fit the objective.
    """
    is_eagle3 = drafter.config.speculators_model_type == "eagle3"
    return Eagle3Objective(drafter, settings) if is_eagle3 else BlockObjective(drafter, settings)
