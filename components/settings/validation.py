"""A mapping checked against its model; what is wrong is told in one line, with the key that was
probably meant.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from components.errors import ConfigError
from components.settings.base import Settings, SettingsT
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

SECTIONS: tuple[type[Settings], ...] = (
    TargetSettings,
    EngineSettings,
    SourceSettings,
    CurationSettings,
    StreamSettings,
    DrafterSettings,
    TrainingSettings,
    EvaluationSettings,
    SliceSettings,
    WarmPrefixSettings,
    GateSettings,
    CanarySettings,
    WatchSettings,
    PaceSettings,
)


def validate(model: type[SettingsT], raw: dict[str, Any], where: str) -> SettingsT:
    """`raw` as `model`; `where` names the file in the message.

    Raises:
        ConfigError: an unknown key (the nearest known key is named) or a bad value; all of them in
            one message.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{where} is not valid", got=_explain(model, error)) from None


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        location = ".".join(str(part) for part in item["loc"]) or "recipe"
        if item["type"] == "extra_forbidden":
            near = get_close_matches(
                str(item["loc"][-1]), _known_keys(model, item["loc"][:-1]), n=1
            )
            lines.append(
                f"unknown key {location}" + (f" (did you mean '{near[0]}'?)" if near else "")
            )
        else:
            lines.append(f"{location}: {item['msg']}")

    return "; ".join(lines)


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        field = model.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return [key for section in SECTIONS for key in section.model_fields]
        model = annotation
    return list(model.model_fields)
