"""The cache of samples on disk: found by content, bounded, never another target's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.contracts import TargetFingerprint
from components.errors import FingerprintMismatchError, StreamError
from components.hidden_states.cache import StateCache
from components.hidden_states.sample import Identity

FINGERPRINT = TargetFingerprint(
    weights="a" * 64, quantization="b" * 64, tokenizer="c" * 64, serving="d" * 64
)
IDENTITY = Identity("run", "0", FINGERPRINT, (1, 2, 4), 64)
MIB = 1 << 20


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def opened(
    root: Path, identity: Identity = IDENTITY, *, limit_bytes: int = MIB, complete: bool = False
) -> StateCache:
    return StateCache.open(root, identity, limit_bytes=limit_bytes, is_complete=complete)


def read(cache: StateCache, token_ids: np.ndarray) -> bytes | None:
    entry = cache.find(token_ids)
    if entry is None:
        return None
    buffer = bytearray(entry.num_bytes)
    cache.read_into(entry, memoryview(buffer))
    return bytes(buffer)


def test_samples_are_found_by_their_tokens_now_and_later(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    assert cache.add(ids(1, 2, 3), memoryview(b"first")) and cache.add(
        ids(1, 2), memoryview(b"second")
    )
    assert not cache.add(ids(1, 2, 3), memoryview(b"again"))
    for found in (
        cache,
        opened(tmp_path),
        opened(tmp_path, replace(IDENTITY, run_id="other", consumer="7")),
    ):
        assert (read(found, ids(1, 2, 3)), read(found, ids(1, 2)), read(found, ids(3))) == (
            b"first",
            b"second",
            None,
        )
    cache.close()
    assert opened(tmp_path).num_bytes == len(b"firstsecond")


def test_two_writers_have_files_of_their_own(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    one.add(ids(1), memoryview(b"one"))
    two.add(ids(2), memoryview(b"two"))
    one.add(ids(3), memoryview(b"three"))
    both = opened(tmp_path)
    assert [read(both, ids(n)) for n in (1, 2, 3)] == [b"one", b"two", b"three"]
    assert len(list(tmp_path.rglob("*.bin"))) == 2


@given(st.lists(st.integers(1, 400), max_size=30))
@settings(max_examples=30, deadline=None)
def test_the_limit_holds_whatever_comes(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    root = tmp_path_factory.mktemp("cache")
    cache = opened(root, limit_bytes=1000)
    kept = [cache.add(ids(n), memoryview(bytes(size))) for n, size in enumerate(sizes)]
    assert cache.num_bytes <= 1000
    # What was taken is the longest beginning that fits: a full cache stays as it is.
    assert kept == [sum(sizes[: n + 1]) <= 1000 for n in range(len(sizes))]
    assert len(opened(root)) == sum(kept)
    cache.close()


def test_lines_torn_by_a_kill_and_data_that_is_gone_are_not_found(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.add(ids(1), memoryview(b"whole"))
    cache.add(ids(2), memoryview(b"halved"))
    cache.close()
    (index,) = tmp_path.rglob("*.jsonl")
    index.write_text(index.read_text() + '{"key": "ab')
    data = index.with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:-1])
    again = opened(tmp_path)
    assert (read(again, ids(1)), read(again, ids(2)), len(again)) == (b"whole", None, 1)


def test_what_turned_out_damaged_is_forgotten(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.add(ids(1), memoryview(b"x"))
    entry = cache.find(ids(1))
    assert entry is not None
    entry.path.write_bytes(b"")
    with pytest.raises(StreamError, match="cut short"):
        cache.read_into(entry, memoryview(bytearray(1)))
    cache.forget(ids(1))
    assert cache.find(ids(1)) is None


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (
            replace(IDENTITY, fingerprint=FINGERPRINT.model_copy(update={"weights": "f" * 64})),
            "fingerprint",
        ),
        (replace(IDENTITY, layer_ids=(1, 3, 4)), "layer_ids"),
        (replace(IDENTITY, hidden_size=128), "hidden_size"),
    ],
)
def test_states_of_another_kind_are_refused_by_name(
    other: Identity, word: str, tmp_path: Path
) -> None:
    opened(tmp_path, other).add(ids(1), memoryview(b"theirs"))
    assert opened(tmp_path / "empty").find(ids(1)) is None
    with pytest.raises(FingerprintMismatchError, match=f"of another {word}"):
        opened(tmp_path, complete=True)
    assert opened(tmp_path).find(ids(1)) is None  # a folder of its own


def test_an_offline_cache_has_to_be_there_and_as_it_was_written(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match=r"no cached states.*mode: hybrid"):
        opened(tmp_path, complete=True)
    opened(tmp_path)
    (path,) = tmp_path.rglob("identity.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "layer_ids": [9]}))
    with pytest.raises(StreamError, match="altered"):
        opened(tmp_path)
