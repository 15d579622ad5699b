"""The documents as their checks see them: links, anchors, code spans and code blocks, as Markdown
parsers read them. Nothing is fetched.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

REPO_DIR = Path(__file__).resolve().parents[2]
SNIPPET = re.compile(r'^--8<-- "(?P<path>[^"]+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """One Markdown file.

    Attributes:
        path: absolute.
        tokens: block tokens, inline ones as their children.
    """

    path: Path
    tokens: tuple[Token, ...]

    @property
    def name(self) -> str:
        """Path from the repository's folder."""
        return str(self.path.relative_to(REPO_DIR))

    @property
    def is_record(self) -> bool:
        """Whether it tells of the past, in the names that things had then."""
        return self.path.name.lower() == "changelog.md" or "lab-notes" in self.path.parts

    def links(self) -> Iterator[str]:
        """Targets of links and images, as written."""
        for token in self._inline():
            target = token.attrGet("href") or token.attrGet("src")
            if target is not None:
                yield str(target)

    def code_spans(self) -> Iterator[str]:
        """Text of every inline code span, on one line."""
        for token in self._inline():
            if token.type == "code_inline":
                yield " ".join(token.content.split())

    def code_blocks(self) -> Iterator[tuple[str, str]]:
        """(language, text) of every fenced block; '' where it names no language."""
        for token in self.tokens:
            if token.type == "fence":
                yield token.info.strip(), token.content

    def table_rows(self) -> Iterator[list[Token]]:
        """The inline tokens of each body row of each table, a cell each."""
        row: list[Token] = []
        for before, token in zip(self.tokens, self.tokens[1:], strict=False):
            if token.type == "tr_open":
                row = []
            elif before.type == "td_open" and token.type == "inline":
                row.append(token)
            elif token.type == "tr_close" and row:
                yield row

    def headings(self) -> Iterator[str]:
        """Text of every heading, without its marks."""
        for before, token in zip(self.tokens, self.tokens[1:], strict=False):
            if before.type == "heading_open":
                yield "".join(
                    child.content for child in token.children or () if child.type != "softbreak"
                )

    def anchors(self) -> set[str]:
        """Names that a link may point at, both on the site and where the file is read as it is."""
        return anchors(list(self.headings()))

    def _inline(self) -> Iterator[Token]:
        for token in self.tokens:
            yield from token.children or ()


def anchors(headings: list[str]) -> set[str]:
    """Anchors that Python-Markdown (the site) and GitHub both make of `headings`.

    Python-Markdown takes a run of blanks and dashes as one dash, GitHub each blank as one; a link
    must hold on both, so only names that both make count.
    """
    return _slugs(headings, r"[-\s]+", "_") & _slugs(headings, r"\s", "-")


def _slugs(headings: list[str], gaps: str, numbered: str) -> set[str]:
    found: set[str] = set()
    for heading in headings:
        slug = re.sub(gaps, "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        number = 1
        name = slug
        while name in found:
            name = f"{slug}{numbered}{number}"
            number = number + 1
        found.add(name)
    return found


@cache
def documents() -> tuple[Document, ...]:
    """README.md, CHANGELOG.md and every page under docs/, by path."""
    pages = sorted((REPO_DIR / "docs").rglob("*.md"))
    return tuple(read_document(path) for path in (REPO_DIR / "README.md", _CHANGELOG, *pages))


_CHANGELOG = REPO_DIR / "CHANGELOG.md"


@cache
def read_document(path: Path) -> Document:
    """Parse a Markdown file; what it includes by a snippet is put in its place."""
    text = SNIPPET.sub(lambda found: (REPO_DIR / found["path"]).read_text(), path.read_text())
    parser = MarkdownIt("commonmark").enable("table")
    return Document(path, tuple(parser.parse(text)))


@cache
def repository_files() -> frozenset[str]:
    """Files of the repository, those not yet committed included, and their folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    told = subprocess.run(command, cwd=REPO_DIR, capture_output=True, text=True, check=False)
    # Without git (an image, an archive) the folder itself is the repository.
    names = told.stdout.split("\n") if told.returncode == 0 else map(str, _walk())
    files = {name for name in names if name and (REPO_DIR / name).exists()}
    return frozenset(files | {str(up) for name in files for up in Path(name).parents})


def _walk() -> Iterator[Path]:
    for top in REPO_DIR.iterdir():
        if top.is_file():
            yield top.relative_to(REPO_DIR)
        elif top.name in ("components", "flows", "tasks", "tests", "configs", "docs", "containers"):
            yield from (path.relative_to(REPO_DIR) for path in top.rglob("*") if path.is_file())
