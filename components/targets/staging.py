"""Folders that appear whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.errors import TargetError

# What a target folder holds beside its weights, and every rewritten target takes over unchanged.
_SIDE_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt")


@contextmanager
def staged_folder(destination: Path) -> Iterator[Path]:
    """A temporary folder beside `destination` that becomes it when the block ends without an error.

    If another process put `destination` there meanwhile, that one stays and ours is dropped: names
    follow content here.
    """
    destination = Path(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name[:40]}."))
    temporary.chmod(0o755)

    try:
        yield temporary
        try:
            temporary.rename(destination)
        except OSError:
            if not destination.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def require_absent(destination: Path) -> None:
    """Refuse to write a new target over something.

    Raises:
        TargetError: `destination` exists.
    """
    if Path(destination).exists():
        raise TargetError(
            "the destination exists already",
            got=destination,
            fix="Choose another folder or remove it.",
        )


def copy_side_files(source: Path, destination: Path) -> None:
    """Copy config, tokenizer and template files (no weights, no weight index) from one target
    folder to another.
    """
    for pattern in _SIDE_PATTERNS:
        for file in sorted(Path(source).glob(pattern)):
            if file.is_file() and not file.name.endswith(".safetensors.index.json"):
                shutil.copyfile(file, Path(destination) / file.name)
