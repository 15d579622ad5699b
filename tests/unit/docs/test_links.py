"""Every link, anchor, path and module that the documents name is there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch

import pytest

from tests.support.documents import (
    REPO_DIR,
    Document,
    anchors,
    documents,
    read_document,
    repository_files,
)

GENERATED: set[str] = set()
"""Pages that a command writes: a link to one of them may be ahead of it."""

EXAMPLES = {"configs/my-model.yaml"}
"""Files that the reader is told to make."""

TOP = r"(?:components|flows|tasks|tests|configs|docs|containers|\.ci)"
PATH = re.compile(rf"(?<![\w/.-])(?P<path>{TOP}/[\w./*<>-]*)")
FILE = re.compile(
    r"^(?:README\.md|CHANGELOG\.md|LICENSE|Makefile|Procfile|[\w.-]+\.(?:toml|yaml|yml|txt))$"
)
MODULE = re.compile(r"(?<![\w.])(?P<module>(?:components|flows|tasks|tests)(?:\.[a-z_]\w*)+)")
PYTHON_MODULE = re.compile(r"-m (?P<module>[\w.]+)")

PAGES = [document for document in documents() if document.name.startswith("docs/")]
PRESENT = [document for document in documents() if not document.is_record]


def each(chosen: Sequence[Document]) -> pytest.MarkDecorator:
    """The test once for each of the chosen documents."""
    return pytest.mark.parametrize("document", chosen, ids=lambda one: one.name)


@each(documents())
def test_links_lead_somewhere(document: Document) -> None:
    broken = [link for link in document.links() if not leads_somewhere(link, document)]
    assert broken == []


def leads_somewhere(link: str, document: Document) -> bool:
    """Whether a relative link's file and anchor exist; links to other places are not followed."""
    if re.match(r"[a-z][a-z+.-]*:", link):
        return True
    path, _, anchor = link.partition("#")
    target = (document.path.parent / path).resolve() if path else document.path
    if not target.is_relative_to(REPO_DIR):
        return False
    name = str(target.relative_to(REPO_DIR))
    if name not in repository_files():
        return name in GENERATED
    return not anchor or anchor in read_document(target).anchors()


@each(PAGES)
def test_pages_link_to_pages_only(document: Document) -> None:
    """A site holds docs/ alone: what lies elsewhere is named in code, not linked."""
    pages = REPO_DIR / "docs"
    folder = document.path.parent
    relative = [link.partition("#")[0] for link in document.links() if ":" not in link]
    outside = [link for link in relative if not (folder / link).resolve().is_relative_to(pages)]
    assert outside == []


@each(documents())
def test_paths_exist(document: Document) -> None:
    named = {found["path"] for text in texts(document) for found in PATH.finditer(text)}
    named |= {span for span in document.code_spans() if FILE.match(span)}
    missing = sorted(name for name in named if not exists(name))
    assert missing == []


def texts(document: Document) -> list[str]:
    """Code spans and code blocks."""
    return [*document.code_spans(), *(text for _, text in document.code_blocks())]


def exists(name: str) -> bool:
    """Whether a path, or a pattern with * or <what>, names something of the repository."""
    if name in EXAMPLES:
        return True
    pattern = re.sub(r"<[^>]*>", "*", name).rstrip("/.")
    if "*" in pattern:
        return any(fnmatch(file, pattern) for file in repository_files())
    return pattern in repository_files()


@each(PRESENT)
def test_modules_exist(document: Document) -> None:
    named = {found["module"] for text in texts(document) for found in MODULE.finditer(text)}
    assert sorted(name for name in named if not is_module(name)) == []


def is_module(name: str) -> bool:
    """Whether a dotted name is a module, or a name inside one."""
    parts = name.split(".")
    return any(
        f"{stem}{ending}" in repository_files()
        for stem in ("/".join(parts), "/".join(parts[:-1]))
        for ending in (".py", "/__init__.py")
    )


def test_every_page_is_in_the_navigation() -> None:
    navigation = (REPO_DIR / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = {page.name.removeprefix("docs/") for page in PAGES}
    named = set(re.findall(r"[\w/-]+\.md", navigation))
    assert pages - named == set()
    assert named - pages <= {name.removeprefix("docs/") for name in GENERATED}


def test_an_anchor_must_hold_on_the_site_and_in_the_file() -> None:
    assert anchors(["Back up", "What dies, and then"]) == {"back-up", "what-dies-and-then"}
    assert anchors(["One / two"]) == set()  # one-two on the site, one--two in the file


def test_a_broken_link_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    readme = read_document(REPO_DIR / "README.md")
    assert leads_somewhere("docs/gate.md#looks", readme)
    assert not leads_somewhere("docs/gate.md#no-such-heading", readme)
    assert not leads_somewhere("docs/no-such-page.md", readme)
    assert not leads_somewhere("../elsewhere.md", readme)
    assert not exists("components/no_such_module.py")
    assert not is_module("components.evaluation.gate.conduct")
