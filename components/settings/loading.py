"""From `configs/` to checked settings: a recipe over its preset, a size over both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from components.errors import ConfigError
from components.settings.precision import on_this_machine
from components.settings.recipe import Recipe
from components.settings.services import ServicesSettings
from components.settings.validation import validate

CONFIGS_DIR = Path(__file__).resolve().parents[2] / "configs"
PRESETS_DIR = CONFIGS_DIR / "presets"


def load_recipe(name_or_path: str | Path, *, size: str | None = None) -> Recipe:
    """Load `configs/<name>.yaml` (or a path) over its `training.preset`, and the overlay
    `sizes.<size>` over both.

    Number formats that the recipe leaves to the machine (`native`) are those of this one.

    Raises:
        ConfigError: no such recipe or size, not YAML, an unknown key (the nearest known key is
            named) or a bad value.
    """
    path = _recipe_path(name_or_path)
    raw = _read_yaml(path)
    sizes = raw.pop("sizes", {})
    if size is not None:
        if size not in sizes:
            raise ConfigError(
                f"{path.name} has no size of that name",
                got=size,
                expected=", ".join(sizes) or "none defined",
            )
        raw = _merge(raw, sizes[size])

    # A mistyped key in an unused overlay is an error today, not on the night it is used.
    for overlay in sizes:
        validate(Recipe, _on_preset(_merge(raw, sizes[overlay])), f"{path.name} (size {overlay})")
    return on_this_machine(validate(Recipe, _on_preset(raw), path.name))


def load_services(path: str | Path | None = None) -> ServicesSettings:
    """Load `configs/services.yaml` or the given file.

    Raises:
        ConfigError: as `load_recipe`.
    """
    path = Path(path) if path else CONFIGS_DIR / "services.yaml"
    return validate(ServicesSettings, _read_yaml(path), path.name)


def _recipe_path(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        path = CONFIGS_DIR / f"{name_or_path}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in CONFIGS_DIR.glob("*.yaml") if p.stem != "services")
        raise ConfigError(
            "no such recipe", got=name_or_path, expected=f"a YAML file or one of {', '.join(known)}"
        )
    return path


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError("settings file is missing", got=path) from None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{path.name} is not valid YAML", got=str(error).replace("\n", " ")
        ) from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path.name} must hold a mapping", got=type(raw).__name__)
    return raw


def _on_preset(raw: dict[str, Any]) -> dict[str, Any]:
    """The recipe over what its preset, if it names one, says of `drafter` and `training`."""
    training = raw.get("training")
    name = training.get("preset") if isinstance(training, dict) else None
    if name is None:
        return raw

    known = sorted(path.stem for path in PRESETS_DIR.glob("*.yaml"))
    if name not in known:
        raise ConfigError("no such training.preset", got=name, expected=", ".join(known))

    preset = _read_yaml(PRESETS_DIR / f"{name}.yaml")
    if set(preset) - {"drafter", "training"}:
        raise ConfigError(
            f"presets/{name}.yaml", got=", ".join(preset), expected="drafter and training"
        )

    return _merge(preset, raw)


def _merge(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overlay.items():
        # The weights of a loss are one value: an overlay's `kl` does not join the `ce` below it.
        both = isinstance(value, dict) and isinstance(merged.get(key), dict) and key != "loss"
        merged[key] = _merge(merged[key], value) if both else value
    return merged
