"""Coding prompts from Python's own standard library: real functions, real docstrings, nothing to
download.

A prompt is the head of a documented function (signature and docstring), as it stands or behind a
short request; the target writes the body, so what is learned is how this target codes, not how
CPython does.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from components.errors import CurationError

MIN_DOC_CHARS, MAX_HEAD_CHARS = 50, 700
LEFT_OUT = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "__pycache__"}
)
REQUESTS = (
    "",
    "Complete the following Python function.\n\n",
    "Write the body of this Python function.\n\n",
    "Implement this function in Python and explain it briefly.\n\n",
)


def stdlib_prompts(*, seed: int) -> Iterator[tuple[str, str]]:
    """(where, prompt) for every documented function of suitable size, in seeded order.

    Raises:
        CurationError: this Python has no standard library as source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path for path in root.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(root).parts)
    )
    if not files:
        raise CurationError("source 'python_stdlib' found no source files", got=root)
    shuffler = random.Random(seed)
    shuffler.shuffle(files)
    for path in files:
        for name, head in _heads(path):
            yield f"{path.relative_to(root)}:{name}", shuffler.choice(REQUESTS) + head


def _heads(path: Path) -> Iterator[tuple[str, str]]:
    """Name and head of each documented function of a module; a file that is not plain Python text
    has none.
    """
    # The library ships broken files on purpose, for its own tests.
    try:
        text = path.read_text()
        tree = ast.parse(text)
    except (
        UnicodeDecodeError,
        SyntaxError,
    ):
        return

    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        doc = ast.get_docstring(node)
        if doc is None or len(doc) < MIN_DOC_CHARS or len(node.body) < 2:
            continue
        head = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
        if len(head) <= MAX_HEAD_CHARS:
            yield node.name, head
