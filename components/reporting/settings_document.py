"""`docs/settings.md`, made from the models: `python -m components.reporting.settings_document`.

With `--check` nothing is written, and a file that is not what the models say is an error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from components.errors import ConfigError, run_main
from components.settings.base import Settings
from components.settings.loading import CONFIGS_DIR
from components.settings.recipe import Recipe
from components.settings.services import ServicesSettings

DOCUMENT = CONFIGS_DIR.parent / "docs" / "settings.md"

Schema = Mapping[str, Any]
"""A JSON schema, or a part of one, as pydantic makes it of a model."""

COLUMNS = ("key", "type", "default", "bounds", "meaning")
TYPES = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}
PLURALS = {"integer": "integers", "number": "numbers", "string": "texts", "object": "mappings"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
LEVEL_OF_FILES = 2
"""Headings of the two files; sections are one level below, sections of sections two."""

INTRODUCTION = """\
# Settings

Made from the models in `components/settings` by `make docs-settings`; do not edit it by hand.

A recipe (`configs/<name>.yaml`) says everything about one target; `configs/services.yaml` says
where the services run. A key that is not in these tables is an error that names the nearest known
one, and so is a value out of its bounds. A key that is left out has its default; *required* ones
have none. The word null is YAML's `null`: no value at all.

**Overlays.** A recipe may hold `sizes`: named overlays, each a part of a recipe. The one that is
asked for (`make demo SIZE=full`, the parameter `size` of every flow, `--size` of the gate's
command) is laid over the recipe key by key: mappings are merged, so that a further slice joins the
others; lists, values and `training.loss` are replaced. All overlays are checked whenever the recipe
is loaded, not only the one that is used.

**Presets.** `training.preset: cpu` takes what `configs/presets/cpu.yaml` says of `drafter` and
`training` and lays the recipe, with its overlay, over it in the same way. What neither says has the
default of the tables below.
"""


@dataclass(frozen=True)
class File:
    """A settings file: heading, path of its file for people, and its model."""

    heading: str
    path: str
    model: type[Settings]


FILES = (
    File("Recipe", "configs/<name>.yaml", Recipe),
    File("Services", "configs/services.yaml", ServicesSettings),
)


def settings_document() -> str:
    """The text of `docs/settings.md`: a table of the keys of every section, in Markdown."""
    parts = [INTRODUCTION]
    for file in FILES:
        schema = file.model.model_json_schema()
        heading = f"{file.heading} (`{file.path}`)"
        parts += _Document(schema.get("$defs", {})).sections(
            schema, heading=heading, path="", level=LEVEL_OF_FILES
        )
    return "\n".join(parts)


class _Document:
    """The sections of one file. A model that stands in two places has its table at the first.

    Args:
        definitions: schemas of the models below the file's own, by name.
    """

    def __init__(self, definitions: Schema) -> None:
        self._definitions = definitions
        self._paths: dict[str, str] = {}

    def sections(self, schema: Schema, *, heading: str, path: str, level: int) -> Iterator[str]:
        """Heading, words and table of a model, then those of the models within it."""
        properties: Mapping[str, Schema] = schema["properties"]
        inner: dict[str, str] = {}
        for key, value in properties.items():
            for name in _models_in(value):
                if name not in self._paths:
                    self._paths[name] = inner[name] = f"{path}.{key}" if path else key

        required = schema.get("required", ())
        yield f"{'#' * level} {heading}\n"
        yield f"{schema['description']}\n"
        yield _line(COLUMNS)
        yield _line(["---"] * len(COLUMNS))
        for key, value in properties.items():
            yield _line(self._row(key, value, is_required=key in required))

        yield ""
        for name, inner_path in inner.items():
            yield from self.sections(
                self._definitions[name],
                heading=f"`{inner_path}`",
                path=inner_path,
                level=level + 1,
            )

    def _row(self, key: str, schema: Schema, *, is_required: bool) -> list[str]:
        return [
            f"`{key}`",
            self._type(schema),
            "*required*" if is_required else _default(schema),
            ", ".join(_bounds(schema)),
            schema["description"],
        ]

    def _type(self, schema: Schema) -> str:
        """The values a key takes, in words; a model is a link to its table."""
        if "$ref" in schema:
            path = self._paths[_name_of(schema)]
            return f"[{path}](#{path.replace('.', '')})"
        if "enum" in schema:
            return _either([f"`{value}`" for value in schema["enum"]])
        if alternatives := _alternatives(schema):
            return _either([self._type(one) for one in alternatives])
        if schema["type"] == "array":
            items = schema.get("items") or schema["prefixItems"][0]
            number = f"{schema['maxItems']} " if "prefixItems" in schema else ""
            return f"list of {number}{self._types(items)}"
        if schema["type"] == "object":
            return f"mapping to {self._types(schema['additionalProperties'])}"

        return TYPES[schema["type"]]

    def _types(self, schema: Schema) -> str:
        """As `_type`, of several values."""
        is_plain = "enum" not in schema and schema.get("type") in PLURALS
        return PLURALS[schema["type"]] if is_plain else self._type(schema)


def _alternatives(schema: Schema) -> list[Schema]:
    return [*schema.get("anyOf", ()), *schema.get("oneOf", ())]


def _within(schema: Schema) -> Iterator[Schema]:
    """A schema and all it is made of: alternatives, entries of lists, values of mappings."""
    yield schema
    values = schema.get("additionalProperties")
    below = [*_alternatives(schema), *([values] if isinstance(values, dict) else [])]
    if "items" in schema:
        below.append(schema["items"])
    for one in below:
        yield from _within(one)


def _models_in(schema: Schema) -> list[str]:
    return [_name_of(one) for one in _within(schema) if "$ref" in one]


def _name_of(reference: Schema) -> str:
    return str(reference["$ref"]).rsplit("/", 1)[1]


def _default(schema: Schema) -> str:
    return "its own" if "$ref" in schema else f"`{json.dumps(schema['default'])}`"


def _bounds(schema: Schema) -> Iterator[str]:
    for one in (schema, *_alternatives(schema)):
        yield from (f"{sign} {one[name]:g}" for name, sign in BOUNDS.items() if name in one)
        if "prefixItems" not in one and (least := one.get("minItems")):
            yield f"at least {least} {'entry' if least == 1 else 'entries'}"
        if "pattern" in one:
            yield f"matches `{one['pattern']}`"


def _either(words: list[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _line(cells: list[str] | tuple[str, ...]) -> str:
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def main(arguments: list[str] | None = None) -> int:
    """Write the document, or with `--check` compare it.

    Raises:
        ConfigError: with `--check`, the file is missing or is not what the models say.
    """
    parser = argparse.ArgumentParser(
        prog="python -m components.reporting.settings_document",
        description="Write docs/settings.md.",
    )
    parser.add_argument("--check", action="store_true", help="compare it, and write nothing")
    options = parser.parse_args(arguments)
    text = settings_document()

    if not options.check:
        DOCUMENT.write_text(text)
    elif not DOCUMENT.is_file() or DOCUMENT.read_text() != text:
        raise ConfigError(
            "docs/settings.md is not what components/settings says", fix="Run: make docs-settings"
        )

    return 0


if __name__ == "__main__":
    run_main(main)
