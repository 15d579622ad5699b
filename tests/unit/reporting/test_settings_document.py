"""docs/settings.md is what the models say, and they say all of it in sentences."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from components.errors import run_main
from components.reporting import settings_document as document
from components.settings import Recipe, ServicesSettings, Settings

SIGNS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))


def sections(model: type[Settings], path: str) -> Iterator[tuple[str, type[Settings]]]:
    """Every section of a file with its path, `curation.sources` for a source in curation."""
    yield path, model
    for key, field in model.model_fields.items():
        waiting: list[object] = [field.annotation]
        while waiting:
            one = waiting.pop()
            waiting += typing.get_args(one)
            if isinstance(one, type) and issubclass(one, Settings):
                yield from sections(one, f"{path}.{key}".removeprefix("Recipe."))


SECTIONS = {
    path: model
    for path, model in (*sections(Recipe, "Recipe"), *sections(ServicesSettings, "Services"))
    if path != "curation.decontaminate_against"  # sources, whose table stands at the first place
}
FIELDS = {
    f"{path}: {key}": field
    for path, model in SECTIONS.items()
    for key, field in model.model_fields.items()
}


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """Cells of every row of the document, by `section: key`."""
    found: dict[str, list[str]] = {}
    path = ""
    for line in document.settings_document().splitlines():
        if line.startswith("#"):
            path = line.strip("# ").partition(" (")[0].strip("`")
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            key = f"{path}: {cells[0].strip('`')}"
            assert key not in found, f"{key} has two rows"
            found[key] = [cell.replace(r"\|", "|") for cell in cells]
    return found


@pytest.mark.parametrize("key", FIELDS)
def test_every_key_is_explained_in_full_sentences(key: str) -> None:
    meaning = FIELDS[key].description
    assert meaning, f"{key} has no description"
    assert re.match(r"[A-Z]", meaning), f"{key} does not begin with a capital letter: {meaning}"
    assert meaning.endswith("."), f"{key} does not end with a full stop: {meaning}"
    assert "  " not in meaning and "\n" not in meaning
    for sentence in re.split(r"(?<=\.) ", meaning):
        assert re.match(r"[A-Z`]", sentence) and len(sentence.split()) >= 3, f"{key}: {sentence}"


@pytest.mark.parametrize("model", SECTIONS.values(), ids=SECTIONS)
def test_every_section_has_a_paragraph_of_its_own(model: type[Settings]) -> None:
    words = vars(model).get("__doc__")
    assert words and words.strip().endswith(".")


def test_the_document_has_one_row_for_each_key(rows: dict[str, list[str]]) -> None:
    assert set(rows) == set(FIELDS)


@pytest.mark.parametrize("key", FIELDS)
def test_a_row_tells_default_bounds_and_meaning(key: str, rows: dict[str, list[str]]) -> None:
    _, _, default, bounds, meaning = rows[key]
    field = FIELDS[key]
    assert default == expected_default(field)
    for kind, name, sign in SIGNS:
        limits = [getattr(one, name) for one in field.metadata if isinstance(one, kind)]
        assert [f"{sign} {limit:g}" for limit in limits] == re.findall(rf"{sign} [\d.]+", bounds)
    assert meaning == field.description


def expected_default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    return "its own" if isinstance(field.default, Settings) else f"`{json.dumps(field.default)}`"


def test_types_are_told_in_words(rows: dict[str, list[str]]) -> None:
    told = {key: cells[1] for key, cells in rows.items()}
    assert told["engine: enforce_eager"] == "true or false"
    assert told["engine: device"] == "`auto`, `cpu` or `cuda`"
    assert told["training: num_steps"] == "integer or null"
    assert told["training: loss"] == "mapping to numbers"
    assert told["evaluation: ngram_lookup"] == "list of 2 integers"
    assert told["curation: sources"] == "list of [curation.sources](#curationsources)"
    assert told["Recipe: pace"] == "[pace](#pace) or null"


def test_links_lead_to_headings() -> None:
    text = document.settings_document()
    headings = {
        re.sub(r"[^\w -]", "", heading).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text.lower(), re.MULTILINE)
    }
    links = set(re.findall(r"\]\(#([^)]+)\)", text))
    assert links and links <= headings


def test_the_file_in_docs_is_current() -> None:
    assert document.DOCUMENT.read_text() == document.settings_document(), "run make docs-settings"


def test_a_stale_document_is_one_message_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(document, "DOCUMENT", tmp_path / "settings.md")
    told = []
    for content in (None, "# Settings\n"):  # missing, and another
        if content is not None:
            document.DOCUMENT.write_text(content)
        with pytest.raises(SystemExit) as ended:
            run_main(lambda: document.main(["--check"]))
        assert ended.value.code == 1
        told.append(capsys.readouterr())
    assert all(one.out == "" and one.err.count("\n") == 1 for one in told)
    assert all("make docs-settings" in one.err for one in told)
    assert document.DOCUMENT.read_text() == "# Settings\n"  # `--check` writes nothing


def test_what_is_written_passes_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "DOCUMENT", tmp_path / "settings.md")
    assert document.main([]) == 0 and document.main(["--check"]) == 0
    assert document.DOCUMENT.read_text() == document.settings_document()
