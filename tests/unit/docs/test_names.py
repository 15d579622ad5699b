"""Keys, commands, flows and messages in the documents are those of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.errors import ConfigError
from components.settings import CONFIGS_DIR, Recipe, ServicesSettings, load_recipe
from tests.support.documents import REPO_DIR, Document, documents, read_document

NOW = tuple(document for document in documents() if not document.is_record)
"""Documents of how things are; records keep the names of their day."""

SECTIONS = {name: field.annotation for name, field in Recipe.model_fields.items() if name != "name"}
KEY = re.compile(rf"^(?P<section>{'|'.join(SECTIONS)})\.(?P<key>[a-z][a-z_0-9]*)(?=[.:\s]|$)")
FILE_ENDINGS = {"html", "json", "jsonl", "md", "py", "yaml", "png"}
DOTS = "…"

every_document = pytest.mark.parametrize("document", NOW, ids=lambda one: one.name)


@every_document
def test_keys_are_those_of_the_settings(document: Document) -> None:
    found = [match for span in document.code_spans() if (match := KEY.match(span))]
    named = {(match["section"], match["key"]) for match in found}
    unknown = sorted(
        f"{section}.{key}"
        for section, key in named
        if key not in FILE_ENDINGS and key not in keys_of(section)
    )
    assert unknown == []


def keys_of(section: str) -> set[str]:
    """Keys of a recipe's section; of an optional one, too."""
    annotation: Any = SECTIONS[section]
    models = [annotation, *getattr(annotation, "__args__", ())]
    return {key for model in models for key in getattr(model, "model_fields", ())}


def recipe_blocks() -> list[tuple[str, dict[str, Any]]]:
    """YAML blocks of the documents that are a recipe or a part of one."""
    found = []
    for document in NOW:
        for number, (language, text) in enumerate(document.code_blocks()):
            block = yaml.safe_load(text) if language == "yaml" else None
            if isinstance(block, dict) and block.keys() <= Recipe.model_fields.keys():
                found.append((f"{document.name} block {number}", block))
    return found


@pytest.mark.parametrize(
    "block", [block for _, block in recipe_blocks()], ids=[name for name, _ in recipe_blocks()]
)
def test_recipes_load(block: dict[str, Any], tmp_path: Path) -> None:
    """A whole recipe as it stands, a part over the demo's."""
    base = {} if "name" in block else yaml.safe_load((CONFIGS_DIR / "demo.yaml").read_text())
    base.pop("sizes", None)
    merged = {**base, **block}
    for name in base.keys() & block.keys() - {"target"}:
        merged[name] = {**base[name], **block[name]}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(merged))
    assert load_recipe(path).name


def test_a_whole_recipe_is_among_them() -> None:
    whole = {"name", "target", "curation", "evaluation"}
    assert any(block.keys() >= whole for _, block in recipe_blocks())


def test_a_wrong_key_in_a_block_would_be_found(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    whole = next(block for _, block in recipe_blocks() if "name" in block)
    path.write_text(yaml.safe_dump({**whole, "training": {"preset": "paper", "epochs": 3}}))
    with pytest.raises(ConfigError, match=r"unknown key training\.epochs"):
        load_recipe(path)


@every_document
def test_deployments_in_blocks_are_flows(document: Document) -> None:
    for language, text in document.code_blocks():
        block = yaml.safe_load(text) if language == "yaml" else None
        for deployment in (block or {}).get("deployments", []):
            folder, module, function = deployment["entrypoint"].split(".")
            source = (REPO_DIR / folder / f"{module}.py").read_text()
            assert f"def {function}(" in source


@every_document
def test_make_targets_exist(document: Document) -> None:
    makefile = (REPO_DIR / "Makefile").read_text()
    known = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    commands = "\n".join([*document.code_spans(), *(text for _, text in document.code_blocks())])
    named = set(re.findall(r"^make ([a-z][a-z-]*)", commands, re.MULTILINE))
    assert named - known == set()


@every_document
def test_flows_exist(document: Document) -> None:
    deployed = yaml.safe_load((REPO_DIR / "prefect.yaml").read_text())["deployments"]
    known = {one["entrypoint"].split(".")[1].replace("_", "-") for one in deployed}
    commands = "\n".join([*document.code_spans(), *(text for _, text in document.code_blocks())])
    named = set(re.findall(r"dspark run ([a-z-]+)", commands))
    named |= set(re.findall(r"'([a-z]+-[a-z-]+)/[a-z]", commands))
    assert named - known == set()


def test_services_settings_are_known() -> None:
    page = next(one for one in NOW if one.name == "docs/operate.md")
    cells = [row[2] for row in page.table_rows() if len(row) == 3]
    spans = [span for cell in cells for span in code_of(cell)]
    named = {span for span in spans if span.endswith("_port") or span == "state_dir"}
    assert named and named <= ServicesSettings.model_fields.keys()


def code_of(cell: Any) -> list[str]:
    """Code spans of a table's cell."""
    return [token.content for token in cell.children or () if token.type == "code_inline"]


def told_messages() -> list[str]:
    """First column of the tables of messages, whose first cell is code."""
    page = read_document(REPO_DIR / "docs" / "troubleshooting.md")
    return [code_of(row[0])[0] for row in page.table_rows() if len(row) == 3 and code_of(row[0])]


@cache
def texts_of_the_code() -> tuple[str, ...]:
    """Every string of the code, an f-string as its fixed parts; and the lines of the set-up."""
    found = [(REPO_DIR / ".ci" / "setup").read_text()]
    for folder in ("components", "tasks", "flows"):
        for path in sorted((REPO_DIR / folder).rglob("*.py")):
            nodes = ast.walk(ast.parse(path.read_text()))
            values = [node.value for node in nodes if isinstance(node, ast.Constant)]
            found += [value for value in values if isinstance(value, str)]
    return tuple(found)


@pytest.mark.parametrize("message", told_messages())
def test_messages_are_those_of_the_code(message: str) -> None:
    parts = [part.strip() for part in message.split(DOTS) if part.strip()]
    assert parts
    missing = [part for part in parts if not any(part in text for text in texts_of_the_code())]
    assert missing == []


def test_there_are_many_messages() -> None:
    assert len(set(told_messages())) == len(told_messages()) >= 25


def test_the_readme_is_short() -> None:
    assert len((REPO_DIR / "README.md").read_text().splitlines()) <= 110


@pytest.mark.parametrize("document", documents(), ids=lambda one: one.name)
def test_one_spelling_of_dataset(document: Document) -> None:
    assert re.findall(r"data[ -]+sets?\b", document.path.read_text(), re.IGNORECASE) == []
