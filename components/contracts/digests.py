"""Content identity: sha256 of canonical JSON and of files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def digest_json(value: object) -> str:
    """sha256 (hex) of the canonical JSON of `value`: sorted keys, no spaces."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def digest_file(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
