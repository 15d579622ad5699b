"""Words, n-grams, their hashes and batches of rows, shared by the steps of curation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from xxhash import xxh3_64_intdigest

T = TypeVar("T")
WORD = re.compile(r"\w+", re.UNICODE)


def words(text: str) -> list[str]:
    """Lower-case words without punctuation or spacing: what two texts are compared by."""
    return WORD.findall(text.lower())


def ngrams(tokens: list[str], size: int) -> set[str]:
    """All runs of `size` words; the whole text as one run where it is shorter; empty for no
    words.
    """
    if not tokens:
        return set()
    return {
        " ".join(tokens[start : start + size]) for start in range(max(1, len(tokens) - size + 1))
    }


def hash64(text: str) -> int:
    """64-bit hash, the same on every machine and run (Python's own `hash` is not)."""
    return xxh3_64_intdigest(text.encode())


def is_broken(text: str) -> bool:
    """Whether decoding went wrong somewhere: lone surrogates, replacement characters, NUL and other
    controls.
    """
    return any(
        "\ud800" <= char <= "\udfff"
        or char == "\ufffd"
        or (char < " " and char not in "\n\r\t")
        or char == "\x7f"
        for char in text
    )


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` items, the last one shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
