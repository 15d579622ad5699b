"""Where new versions of a target appear: one symlink, swapped in a single step."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from components.errors import TargetError
from components.targets.folder import check_target_folder


def publish_target(path: Path, *, watched: Path) -> Path:
    """Point the symlink `watched` at the target folder `path`; readers see the old one or the new
    one, never neither.

    Raises:
        TargetError: `path` is not a complete target, or something that is not a symlink stands at
            `watched`.
    """
    path = Path(path).resolve()
    watched = Path(watched)
    check_target_folder(path)
    if watched.exists() and not watched.is_symlink():
        raise TargetError(
            "the watched place is not a symlink",
            got=watched,
            fix="Move it away, or watch another path (watch.path).",
        )

    watched.parent.mkdir(parents=True, exist_ok=True)
    temporary = watched.with_name(f".{watched.name}.{os.getpid()}.{secrets.token_hex(4)}")
    temporary.symlink_to(path, target_is_directory=True)
    try:
        temporary.replace(watched)
    finally:
        temporary.unlink(missing_ok=True)

    return watched


def read_published(watched: Path) -> Path:
    """The folder `watched` (a symlink or a plain folder) stands for now, resolved, so that it
    cannot move while read.

    Raises:
        TargetError: nothing is published there, or the link leads nowhere.
    """
    watched = Path(watched)
    if not watched.is_dir():
        problem = (
            "the published target is gone"
            if watched.is_symlink()
            else "no target is published here"
        )
        raise TargetError(problem, got=watched.readlink() if watched.is_symlink() else watched)
    return watched.resolve()
