"""The recipe of a target: all sections, and what must fit between them."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from components.settings.base import Settings
from components.settings.sections.canary import CanarySettings
from components.settings.sections.curation import CurationSettings
from components.settings.sections.drafter import DrafterSettings
from components.settings.sections.engine import EngineSettings
from components.settings.sections.evaluation import EvaluationSettings
from components.settings.sections.gate import GateSettings
from components.settings.sections.pace import PaceSettings
from components.settings.sections.stream import StreamSettings
from components.settings.sections.target import TargetSettings
from components.settings.sections.training import TrainingSettings
from components.settings.sections.watch import WatchSettings


class Recipe(Settings):
    """Everything the loop needs to know about one target: one YAML file in `configs/`."""

    name: str = Field(
        description="Name of the recipe: its deployments in `prefect.yaml` bear it, as in"
        " `drafter-lifecycle/<name>`, and reports and decisions are bound to it."
    )
    target: TargetSettings = Field(
        description="The model that is drafted for, and where its weights come from."
    )
    engine: EngineSettings = Field(
        default=EngineSettings(),
        description="How vLLM is started, for all engines of the recipe.",
    )
    curation: CurationSettings = Field(
        description="Where prompts come from, and which of them become the training dataset."
    )
    stream: StreamSettings = Field(
        description="Which hidden states the trainer gets, and how they travel."
    )
    drafter: DrafterSettings = Field(
        default=DrafterSettings(),
        description="Shape of the drafter, and where its weights start.",
    )
    training: TrainingSettings = Field(
        default=TrainingSettings(),
        description="How the drafter is trained, and for how long.",
    )
    evaluation: EvaluationSettings = Field(
        description="What is measured of the drafter as it is served."
    )
    gate: GateSettings = Field(
        default=GateSettings(),
        description="The rules that a measured drafter must pass.",
    )
    canary: CanarySettings = Field(
        default=CanarySettings(),
        description="How a release takes over the traffic, and what turns it back.",
    )
    watch: WatchSettings = Field(
        default=WatchSettings(),
        description="Where a changed target appears, and when the old drafter may stay.",
    )
    pace: PaceSettings | None = Field(
        default=None,
        description="Time that a run has, with what it may do less of to keep it; null does the"
        " recipe's own amounts, however long they take.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """What no section can check alone, for it takes two of them."""
        needed = self.curation.max_prompt_tokens + self.curation.max_answer_tokens
        if needed > self.engine.max_model_len:
            raise ValueError(
                f"curation.max_prompt_tokens + max_answer_tokens = {needed} exceeds "
                "engine.max_model_len"
                f" = {self.engine.max_model_len}"
            )
        if (prefix := self.evaluation.warm_prefix) is not None:
            needed = prefix.prefix_tokens + self.evaluation.max_tokens
            if needed >= self.engine.max_model_len:
                raise ValueError(
                    f"evaluation.warm_prefix.prefix_tokens + max_tokens = {needed} leaves no "
                    "place for a"
                    f" question in engine.max_model_len = {self.engine.max_model_len}"
                )

        if (
            self.gate.min_speedup is not None
            and self.gate.serving_requests_in_flight not in self.evaluation.speed_requests_in_flight
        ):
            raise ValueError(
                "gate.min_speedup needs gate.serving_requests_in_flight among"
                " evaluation.speed_requests_in_flight"
            )
        if (
            self.drafter.start == "target_layers"
            and len(self.drafter.start_layers) != self.drafter.num_layers
        ):
            raise ValueError(
                "drafter.start_layers must name one target layer per draft layer (num_layers)"
            )

        return self
