"""Exact and near duplicates of prompts.

Exact: the content id. Near: MinHash-LSH (rensa) over word 3-grams proposes candidates, and the exact Jaccard similarity
of their sets decides, so LSH's false positives cost a comparison and never a row.

With b bands of r rows a pair of similarity s is proposed with probability 1 - (1 - s^r)^b (Leskovec, Rajaraman and
Ullman, Mining of Massive Datasets, 3.4). 17 bands of 7 rows: 0.98 at s = 0.8, 0.77 at 0.7, 0.12 at 0.5.

rensa rather than datasketch: its index lies in compact tables outside Python, 500k texts in under 2 GB with everything
else; datasketch keeps a Python set per band and text, fourteen times slower and five times larger (docs/lab-notes.md).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from rensa import RMinHash, RMinHashLSH

from components.curation.conversation import Conversation
from components.curation.text import hash64, ngrams, words

NUM_BANDS = 17
ROWS_PER_BAND = 7
NUM_PERMUTATIONS = NUM_BANDS * ROWS_PER_BAND
SHINGLE_WORDS = 3
_SEED = 1
_THRESHOLD = 0.8
"""Asked for by rensa's constructor; the bands decide what is proposed, our own threshold what is a duplicate."""

Shingles = npt.NDArray[np.uint64]
"""Sorted distinct hashes of word 3-grams."""


def shingles(text: str) -> Shingles:
    """Hashed word 3-grams of a text; a shorter text is one shingle, a text without words none."""
    return _hashed(ngrams(words(text), SHINGLE_WORDS))


def _hashed(grams: set[str]) -> Shingles:
    return np.unique(np.fromiter(map(hash64, grams), dtype=np.uint64, count=len(grams)))


def jaccard(left: Shingles, right: Shingles) -> float:
    """|A and B| / |A or B|, 0 to 1; 0 for two empty sets."""
    shared = len(np.intersect1d(left, right, assume_unique=True))
    union = len(left) + len(right) - shared
    return shared / union if union else 0.0


class NearDuplicateIndex:
    """Texts seen so far, searched by similarity. Memory: 17 bucket entries and 8 bytes per word 3-gram of a text."""

    def __init__(self, *, threshold: float) -> None:
        self._threshold = threshold
        self._lsh = RMinHashLSH(_THRESHOLD, NUM_PERMUTATIONS, NUM_BANDS)
        self._keys: list[str] = []
        self._sets: list[Shingles] = []

    def similar(self, text: str) -> list[tuple[str, float]]:
        """Key and Jaccard similarity of all of LSH's candidates."""
        grams = ngrams(words(text), SHINGLE_WORDS)
        return self._scored(_hashed(grams), _sketch(grams)) if grams else []

    def add(self, key: str, text: str) -> None:
        """Add a text, whatever it is like. One without words is like no other and is not kept."""
        grams = ngrams(words(text), SHINGLE_WORDS)
        if grams:
            self._insert(key, _hashed(grams), _sketch(grams))

    def add_if_new(self, key: str, text: str) -> str | None:
        """Add a text unless one at or above the threshold is here already; return that one's key, or None if added."""
        grams = ngrams(words(text), SHINGLE_WORDS)
        if not grams:
            return None
        found, sketch = _hashed(grams), _sketch(grams)
        similarity, near = max(((score, name) for name, score in self._scored(found, sketch)), default=(0.0, ""))
        if similarity >= self._threshold:
            return near
        self._insert(key, found, sketch)
        return None

    def _insert(self, key: str, found: Shingles, sketch: RMinHash) -> None:
        self._lsh.insert(len(self._keys), sketch)
        self._keys.append(key)
        self._sets.append(found)

    def _scored(self, found: Shingles, sketch: RMinHash) -> list[tuple[str, float]]:
        return [(self._keys[index], jaccard(found, self._sets[index])) for index in self._lsh.query(sketch)]


def _sketch(grams: set[str]) -> RMinHash:
    sketch = RMinHash(NUM_PERMUTATIONS, _SEED)
    sketch.update(list(grams))
    return sketch


def cross_similarity(
    validation: Iterable[Conversation], train: Iterable[Conversation], *, threshold: float
) -> dict[str, float]:
    """Largest similarity of each validation conversation (by id) to any training one: proof that the split is clean.

    The smaller side is indexed and the larger one passes by, so memory follows the smaller. Pairs far below the
    threshold may be missed.
    """
    index = NearDuplicateIndex(threshold=threshold)
    largest: dict[str, float] = {}
    for conversation in validation:
        index.add(conversation.id, conversation.text)
        largest[conversation.id] = 0.0
    for conversation in train:
        for key, similarity in index.similar(conversation.text):
            largest[key] = max(largest[key], similarity)
    return largest
