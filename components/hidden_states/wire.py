"""The object a sample becomes in the store, and its name; shared by the writer in vLLM's process
and the reader.

    offset 0      8 bytes magic, 4 bytes little-endian length, UTF-8 JSON of `SampleHeader`, zeros
    up to 1,024 bytes offset 1024   states_TLH, row-major, in the header's dtype
    aligned 64    scales_TL, float32, of dtype float8_e4m3fn only
    aligned 64    token ids, int32, T of them

Every length follows from (T, L, H, dtype), so a reader knows an object's size before it exists:
credits and buffers are taken before a request is sent. T tokens, L layers, H hidden.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import xxhash
from pydantic import Field, ValidationError

from components.contracts import Record
from components.errors import ConfigError, StreamError

VERSION = 1
HEADER_BYTES = 1024
ALIGN_BYTES = 64  # a cache line; also what tensors want to start on
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}
FLOAT8 = "float8_e4m3fn"
"""The one dtype with scales (`codec`)."""
_MAGIC = b"DSPKHS01"
_LENGTH = struct.Struct("<I")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,119}")


class SampleHeader(Record):
    """What the writer stamps on each sample; the reader refuses a sample that says anything else
    than it expects.
    """

    version: int = VERSION
    run_id: str
    sample: str = Field(description="the name the client gave: '<consumer>-<index>-<attempt>'")
    weights: str = Field(description="weights part of the target's fingerprint")
    fingerprint: str = Field(description="digest of the whole TargetFingerprint")
    layer_ids: tuple[int, ...]
    dtype: str
    shape: tuple[int, int, int] = Field(description="T, L, H")
    checksum: str = Field(description="xxh3-64 (hex) of everything after the header")


@dataclass(frozen=True)
class Layout:
    """Byte offsets of one object."""

    states_offset: int
    states_bytes: int
    scales_offset: int
    scales_bytes: int
    tokens_offset: int
    tokens_bytes: int
    num_bytes: int


def layout(
    *, num_tokens: int, num_layers: int, hidden_size: int, dtype: str = "bfloat16"
) -> Layout:
    """Byte layout of a sample with states of shape (num_tokens, num_layers, hidden_size)."""
    states_bytes = num_tokens * num_layers * hidden_size * ITEM_BYTES[dtype]
    scales_offset = align(HEADER_BYTES + states_bytes)
    scales_bytes = 4 * num_tokens * num_layers if dtype == FLOAT8 else 0
    tokens_offset = align(scales_offset + scales_bytes)
    return Layout(
        states_offset=HEADER_BYTES,
        states_bytes=states_bytes,
        scales_offset=scales_offset,
        scales_bytes=scales_bytes,
        tokens_offset=tokens_offset,
        tokens_bytes=4 * num_tokens,
        num_bytes=align(tokens_offset + 4 * num_tokens),
    )


def align(num_bytes: int) -> int:
    """`num_bytes` rounded up to the alignment of the format."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def payload_checksum(buffer: memoryview) -> str:
    """xxh3-64 (hex) of a whole object without its header."""
    return xxhash.xxh3_64_hexdigest(buffer[HEADER_BYTES:])


def pack_header(header: SampleHeader) -> bytes:
    """Exactly `HEADER_BYTES` bytes."""
    text = header.model_dump_json().encode()
    if len(text) > HEADER_BYTES - len(_MAGIC) - _LENGTH.size:
        raise ConfigError(
            "a sample header does not fit its space",
            got=f"{len(text)} bytes",
            fix="Shorten the run id.",
        )
    return (_MAGIC + _LENGTH.pack(len(text)) + text).ljust(HEADER_BYTES, b"\0")


def unpack_header(buffer: memoryview) -> SampleHeader:
    """Read the header of an object.

    Raises:
        StreamError: the bytes are not such an object.
    """
    start = len(_MAGIC) + _LENGTH.size
    if bytes(buffer[: len(_MAGIC)]) != _MAGIC:
        raise StreamError(
            "not a hidden-state sample", got=bytes(buffer[: len(_MAGIC)]), expected=_MAGIC
        )

    (length,) = _LENGTH.unpack(buffer[len(_MAGIC) : start])
    try:
        return SampleHeader.model_validate_json(
            bytes(buffer[start : min(start + length, HEADER_BYTES)])
        )
    except ValidationError as error:
        raise StreamError(
            "a sample header is damaged", got=f"{error.error_count()} invalid fields"
        ) from None


def checked_name(name: str, *, what: str) -> str:
    """`name` if it may be part of a store key (letters, digits, '_', '.', '-').

    Raises:
        ConfigError: it may not.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} cannot be part of a store key", got=repr(name), expected=_NAME.pattern
        )
    return name


def sample_name(*, consumer: str, index: int, attempt: int) -> str:
    """Name of one attempt at one sample. A put on an existing key is ignored by the store, so
    attempts never share.
    """
    return f"{consumer}-{index}-{attempt}"


def store_key(run_id: str, name: str) -> str:
    """Store key of a sample of a run."""
    return f"{run_id}/{name}"


def error_key(key: str) -> str:
    """Key of the marker that stands for a sample that could not be written."""
    return f"{key}:error"


def run_prefix(run_id: str, consumer: str | None = None) -> str:
    """Common beginning of all keys of a run, or of one consumer of it."""
    return f"{run_id}/" if consumer is None else f"{run_id}/{consumer}-"


def budget_split(budget_bytes: int) -> tuple[int, int]:
    """(bytes the store may hold, bytes of reader buffers); a sample in transit is counted in both,
    so the sum holds.

    A sixteenth is kept back: the store frees a removed sample's memory a moment after its key is
    gone, so what it holds can pass what is counted by a sample.
    """
    buffers = budget_bytes // 2 // ALIGN_BYTES * ALIGN_BYTES
    return budget_bytes - budget_bytes // 16 - buffers, buffers
