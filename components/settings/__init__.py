"""pydantic models of `configs/*.yaml`: the recipe of a target, and what the services need.

Each component owns one small section; functions take their own section, never the whole recipe.
Unknown keys are errors. A recipe may carry `sizes`: named overlays merged over it
(`make demo SIZE=full`). One module per section; importers take every name from here.
"""

from __future__ import annotations

from components.settings.base import Settings, SettingsT
from components.settings.loading import CONFIGS_DIR, PRESETS_DIR, load_recipe, load_services
from components.settings.precision import native_dtype
from components.settings.recipe import Recipe
from components.settings.sections.canary import CanarySettings
from components.settings.sections.curation import CurationSettings, SourceSettings
from components.settings.sections.drafter import DrafterSettings
from components.settings.sections.engine import EngineSettings
from components.settings.sections.evaluation import EvaluationSettings
from components.settings.sections.evaluation_slice import SliceSettings, WarmPrefixSettings
from components.settings.sections.gate import GateSettings
from components.settings.sections.pace import PaceSettings
from components.settings.sections.stream import StreamSettings
from components.settings.sections.target import TargetSettings
from components.settings.sections.training import TrainingSettings
from components.settings.sections.watch import WatchSettings
from components.settings.services import ServicesSettings
from components.settings.validation import SECTIONS

__all__ = [
    "CONFIGS_DIR",
    "PRESETS_DIR",
    "SECTIONS",
    "CanarySettings",
    "CurationSettings",
    "DrafterSettings",
    "EngineSettings",
    "EvaluationSettings",
    "GateSettings",
    "PaceSettings",
    "Recipe",
    "ServicesSettings",
    "Settings",
    "SettingsT",
    "SliceSettings",
    "SourceSettings",
    "StreamSettings",
    "TargetSettings",
    "TrainingSettings",
    "WarmPrefixSettings",
    "WatchSettings",
    "load_recipe",
    "load_services",
    "native_dtype",
]
