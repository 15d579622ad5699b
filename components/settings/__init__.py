"""pydantic models of `configs/*.yaml`: the recipe of a target, and what the services need.

Each component owns one small section; functions take their own section, never the whole recipe.
Unknown keys are errors. A recipe may carry `budgets`: named overlays merged over it (`make demo BUDGET=full`).
One module per section; importers take every name from here.
"""

from __future__ import annotations

from components.settings.base import Settings, SettingsT
from components.settings.canary import CanarySettings
from components.settings.curation import CurationSettings, SourceSettings
from components.settings.drafter import DrafterSettings
from components.settings.engine import EngineSettings
from components.settings.evaluation import EvaluationSettings
from components.settings.evaluation_slice import SliceSettings, WarmPrefixSettings
from components.settings.gate import GateSettings
from components.settings.loading import CONFIGS_DIR, PRESETS_DIR, load_recipe, load_services
from components.settings.pace import PaceSettings
from components.settings.precision import native_dtype
from components.settings.recipe import Recipe
from components.settings.services import ServicesSettings
from components.settings.stream import StreamSettings
from components.settings.target import TargetSettings
from components.settings.training import TrainingSettings
from components.settings.validation import SECTIONS
from components.settings.watch import WatchSettings

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
