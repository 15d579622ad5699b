"""Exact and near duplicates of prompts.

Exact: the content id. Near: MinHash-LSH (datasketch) over word 3-grams proposes candidates, and the exact Jaccard
similarity of their sets decides, so LSH's false positives cost a comparison and never a row. With 128 permutations LSH
misses a few pairs close to the threshold (Broder 1997: the estimate's standard error is sqrt(J (1 - J) / 128)).
"""

from __future__ import annotations

from collections.abc import Sequence

from datasketch import MinHash, MinHashLSH

from components.curation.conversation import Conversation
from components.curation.text import hash64, ngrams, words

NUM_PERMUTATIONS = 128
SHINGLE_WORDS = 3
LSH_MARGIN = 0.1
"""LSH is asked below the threshold by this much, so that pairs just above it are still proposed."""

Shingles = frozenset[int]


def shingles(text: str) -> Shingles:
    """Hashed word 3-grams of a text; a shorter text is one shingle."""
    return frozenset(hash64(gram) for gram in ngrams(words(text), SHINGLE_WORDS))


def jaccard(left: Shingles, right: Shingles) -> float:
    """|A and B| / |A or B|, 0 to 1; 0 for two empty sets."""
    union = len(left | right)
    return len(left & right) / union if union else 0.0


class NearDuplicateIndex:
    """Texts seen so far, searched by similarity. Memory: one MinHash and one set of 64-bit hashes per text."""

    def __init__(self, *, threshold: float) -> None:
        self._threshold = threshold
        self._lsh = MinHashLSH(threshold=max(0.1, threshold - LSH_MARGIN), num_perm=NUM_PERMUTATIONS)
        self._sets: dict[str, Shingles] = {}

    def nearest(self, text: str) -> tuple[str | None, float]:
        """Key and Jaccard similarity of the most similar text among LSH's candidates; (None, 0.0) for none."""
        found = shingles(text)
        return self._best(found, self._sketch(found))

    def add(self, key: str, text: str) -> None:
        """Add a text, whatever it is like."""
        found = shingles(text)
        self._lsh.insert(key, self._sketch(found))
        self._sets[key] = found

    def add_if_new(self, key: str, text: str) -> str | None:
        """Add a text unless one at or above the threshold is here already; return that one's key, or None if added."""
        found = shingles(text)
        sketch = self._sketch(found)
        near, similarity = self._best(found, sketch)
        if near is not None and similarity >= self._threshold:
            return near
        self._lsh.insert(key, sketch)
        self._sets[key] = found
        return None

    def _best(self, found: Shingles, sketch: MinHash) -> tuple[str | None, float]:
        candidates = self._lsh.query(sketch)
        scored = [(jaccard(found, self._sets[key]), str(key)) for key in candidates]
        if not scored:
            return None, 0.0
        similarity, nearest = max(scored)
        return nearest, similarity

    @staticmethod
    def _sketch(found: Shingles) -> MinHash:
        sketch = _EMPTY_SKETCH.copy()
        sketch.update_batch(found)
        return sketch


def _low_bits(value: int) -> int:
    """Shingles are hashes already; MinHash permutes 32-bit values."""
    return value & 0xFFFFFFFF


_EMPTY_SKETCH = MinHash(num_perm=NUM_PERMUTATIONS, seed=1, hashfunc=_low_bits)
"""Copied for every text: drawing the permutations anew would take longer than applying them."""


def cross_similarity(
    validation: Sequence[Conversation], train: Sequence[Conversation], *, threshold: float
) -> dict[str, float]:
    """Largest similarity of each validation conversation (by id) to any training one: proof that the split is clean."""
    index = NearDuplicateIndex(threshold=threshold)
    for conversation in train:
        index.add(conversation.id, conversation.text)
    return {conversation.id: index.nearest(conversation.text)[1] for conversation in validation}
