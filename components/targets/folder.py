"""What a target folder must hold, and streaming reads of its safetensors."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from components.errors import TargetError

_CHUNK_BYTES = 1 << 20
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")


class TensorEntry(NamedTuple):
    """One tensor of a safetensors file: where it lies and what it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def check_target_folder(path: Path) -> None:
    """Check that `path` can be served and trained against: config, safetensors, tokenizer, chat
    template.

    Raises:
        TargetError: naming the first thing that is missing or unreadable.
    """
    path = Path(path)
    if not path.is_dir():
        raise TargetError("the target folder does not exist", got=path)

    read_config(path)
    weight_files(path)
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise TargetError(
            f"{path} has no tokenizer", expected=f"one of {', '.join(_TOKENIZER_FILES)}"
        )
    if not read_chat_template(path):
        raise TargetError(
            f"{path} has no chat template",
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            fix="Use the instruct version of the model, or add the template it was trained with.",
        )


def read_config(path: Path) -> dict[str, Any]:
    """The folder's `config.json`.

    Raises:
        TargetError: it is missing, not JSON, or not a model config.
    """
    return _read_json(Path(path) / "config.json")


def read_chat_template(path: Path) -> str | None:
    """The chat template's text, or None. Several named templates are joined in the order of their
    names.
    """
    path = Path(path)
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text()
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _read_json(path / name).get("chat_template") if (path / name).is_file() else None
        if isinstance(template, list):
            return "\n".join(sorted(f"{item['name']}:{item['template']}" for item in template))
        if template:
            return str(template)
    return None


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that make up the model, sorted: those of the index if there is one,
    else all.

    Raises:
        TargetError: there are none, or the index names files that are not there.
    """
    path = Path(path)
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise TargetError(
                f"{path} has no safetensors",
                got=", ".join(sorted(entry.name for entry in path.iterdir())[:8])
                or "an empty folder",
                expected="model.safetensors, or shards with model.safetensors.index.json",
            )
        return files

    names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    missing = [name for name in names if not (path / name).is_file()]
    if missing or not names:
        raise TargetError(
            f"{path} lacks weight files its index names",
            got=", ".join(missing[:4]) or "an empty index",
        )

    return [path / name for name in names]


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one safetensors file, from its header alone, in file order.

    Raises:
        TargetError: the header is damaged or the file is shorter than it says.
    """
    size = Path(file).stat().st_size
    try:
        with Path(file).open("rb") as handle:
            (header_bytes,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(min(header_bytes, size)))
        base = 8 + header_bytes
        entries = [
            TensorEntry(
                name,
                item["dtype"],
                tuple(item["shape"]),
                *(base + offset for offset in item["data_offsets"]),
            )
            for name, item in header.items()
            if name != "__metadata__"
        ]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetError(f"{file} is not a safetensors file", got=error) from None

    if any(entry.end > size for entry in entries):
        raise TargetError(
            f"{file} is cut short",
            got=f"{size} bytes",
            expected=f"{max(e.end for e in entries)} bytes",
        )

    return sorted(entries, key=lambda entry: entry.start)


def hash_tensors(file: Path) -> Iterator[tuple[TensorEntry, str]]:
    """Each tensor of `file` with the sha256 (hex) of its bytes, reading one chunk at a time."""
    entries = read_header(file)
    with Path(file).open("rb") as handle:
        for entry in entries:
            handle.seek(entry.start)
            digest = hashlib.sha256()
            left = entry.end - entry.start
            while left > 0:
                chunk = handle.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise TargetError(f"{file} was cut short while it was read", got=entry.name)
                digest.update(chunk)
                left -= len(chunk)
            yield entry, digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise TargetError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise TargetError(f"{path} cannot be read", got=error) from None
    if not isinstance(value, dict):
        raise TargetError(
            f"{path} cannot be read", got=type(value).__name__, expected="a JSON object"
        )
    return value
