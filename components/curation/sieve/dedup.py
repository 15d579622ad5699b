"""Exact and near duplicates of prompts.

Exact: the content id. Near: MinHash-LSH (rensa) over word 3-grams proposes candidates, and the
exact Jaccard similarity of their sets decides, so LSH's false positives cost a comparison and never
a row.

With b bands of r rows a pair of similarity s is proposed with probability 1 - (1 - s^r)^b
(Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4). 17 bands of 7 rows: 0.98 at s =
0.8, 0.77 at 0.7, 0.12 at 0.5.

Sketches are rensa's; bands, ids and 3-grams lie in a temporary SQLite database with a fixed page
cache: memory is the same for a thousand texts and for millions. rensa's own table takes 2.2 KB a
text (docs/lab-notes/curation.md).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from rensa import RMinHash

from components.curation.conversation import Conversation
from components.curation.text import hash64, ngrams, words

NUM_BANDS = 17
ROWS_PER_BAND = 7
NUM_PERMUTATIONS = NUM_BANDS * ROWS_PER_BAND
SHINGLE_WORDS = 3
_SEED = 1
_CACHE_KIB = 64 * 1024
_BAND_FACTORS = (
    np.random.default_rng(_SEED).integers(0, 2**63, (NUM_BANDS, ROWS_PER_BAND), dtype=np.uint64) * 2
    + 1
)
"""Odd factors of a multilinear hash: one 64-bit key per band, different for equal rows of different
bands.
"""

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


def _scratch_database() -> sqlite3.Connection:
    """A database of this process alone: a file without a name in the temporary folder, gone with
    the connection.
    """
    database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    for pragma in (f"cache_size = -{_CACHE_KIB}", "journal_mode = OFF", "synchronous = OFF"):
        database.execute(f"PRAGMA {pragma}")
    return database


class SeenIds:
    """Ids seen so far, on disk."""

    def __init__(self) -> None:
        self._database = _scratch_database()
        self._database.execute("CREATE TABLE seen (id TEXT PRIMARY KEY) WITHOUT ROWID")

    def add(self, key: str) -> bool:
        """Add an id; False if it is here already."""
        return self._database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (key,)).rowcount == 1


class NearDuplicateIndex:
    """Texts seen so far, searched by similarity. On disk: 17 band entries, the key, 8 bytes a word
    3-gram per text.
    """

    _CANDIDATES = f"""
        SELECT key, shingles FROM texts
        WHERE number IN (SELECT text FROM bands WHERE band IN ({", ".join("?" * NUM_BANDS)}))
    """

    def __init__(self, *, threshold: float) -> None:
        self._threshold = threshold
        self._num_texts = 0
        self._database = _scratch_database()
        self._database.execute(
            "CREATE TABLE texts (number INTEGER PRIMARY KEY, key TEXT, shingles BLOB)"
        )
        self._database.execute(
            "CREATE TABLE bands (band, text, PRIMARY KEY (band, text)) WITHOUT ROWID"
        )
        # And never committed: one transaction is one less flush per text.
        self._database.execute("BEGIN")

    def similar(self, text: str) -> list[tuple[str, float]]:
        """Key and Jaccard similarity of all of LSH's candidates."""
        grams = ngrams(words(text), SHINGLE_WORDS)
        return self._scored(_hashed(grams), _bands(grams)) if grams else []

    def add(self, key: str, text: str) -> None:
        """Add a text, whatever it is like. One without words is like no other and is not kept."""
        grams = ngrams(words(text), SHINGLE_WORDS)
        if grams:
            self._insert(key, _hashed(grams), _bands(grams))

    def add_if_new(self, key: str, text: str) -> str | None:
        """Add a text unless one at or above the threshold is here already; return that one's key,
        or None if added.
        """
        grams = ngrams(words(text), SHINGLE_WORDS)
        if not grams:
            return None
        found, bands = _hashed(grams), _bands(grams)
        similarity, near = max(
            ((score, name) for name, score in self._scored(found, bands)), default=(0.0, "")
        )
        if similarity >= self._threshold:
            return near
        self._insert(key, found, bands)
        return None

    def _insert(self, key: str, found: Shingles, bands: list[int]) -> None:
        number = self._num_texts
        self._num_texts += 1
        self._database.execute("INSERT INTO texts VALUES (?, ?, ?)", (number, key, found.tobytes()))
        self._database.executemany(
            "INSERT OR IGNORE INTO bands VALUES (?, ?)", [(band, number) for band in bands]
        )

    def _scored(self, found: Shingles, bands: list[int]) -> list[tuple[str, float]]:
        candidates = self._database.execute(self._CANDIDATES, bands)
        return [
            (key, jaccard(found, np.frombuffer(blob, dtype=np.uint64))) for key, blob in candidates
        ]


def _bands(grams: set[str]) -> list[int]:
    """One signed 64-bit key per band of the MinHash sketch."""
    sketch = RMinHash(NUM_PERMUTATIONS, _SEED)
    sketch.update(list(grams))
    rows = np.array(sketch.digest(), dtype=np.uint64).reshape(NUM_BANDS, ROWS_PER_BAND)
    keys: list[int] = (rows * _BAND_FACTORS).sum(axis=1).view(np.int64).tolist()
    return keys


def cross_similarity(
    validation: Iterable[Conversation], train: Iterable[Conversation], *, threshold: float
) -> dict[str, float]:
    """Largest similarity of each validation conversation (by id) to any training one: proof that
    the split is clean.

    The smaller side is indexed and the larger one passes by, so memory follows the smaller. Pairs
    far below the threshold may be missed.
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
