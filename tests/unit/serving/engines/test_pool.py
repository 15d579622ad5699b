"""The pool: one engine per key, ports never given twice, everything stopped at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.contracts import TargetFingerprint
from components.serving.engines import pool as pool_module
from components.serving.engines.command import EngineSpec
from components.serving.engines.pool import EnginePool
from components.settings import EngineSettings

FINGERPRINT = TargetFingerprint(weights="a", quantization="b", tokenizer="c", serving="d")


class FakeEngine:
    """Stands for a process; a real engine that refuses to stop cannot be made."""

    def __init__(self, spec: EngineSpec, *, fails: bool = False) -> None:
        self.spec = spec
        self.alive = True
        self.fails = fails

    @classmethod
    def start(cls, spec: EngineSpec, **_: Any) -> FakeEngine:
        return cls(spec)

    @property
    def url(self) -> str:
        return self.spec.url

    def is_alive(self) -> bool:
        return self.alive

    def wait_ended(self, timeout_s: float) -> bool:
        return not self.alive

    def stop(self) -> None:
        self.alive = False
        if self.fails:
            raise RuntimeError("does not stop")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EnginePool:
    monkeypatch.setattr(pool_module, "Engine", FakeEngine)
    return EnginePool(logs_dir=tmp_path, port_base=42000)


def start(pool: EnginePool, key: str) -> Any:
    def make_spec(port: int) -> EngineSpec:
        return EngineSpec(
            name=key,
            model_path="m",
            served_model_name="m",
            settings=EngineSettings(),
            port=port,
            device="cpu",
        )

    return pool.start(key, make_spec, fingerprint=FINGERPRINT)


def test_a_key_names_one_engine_until_it_dies(pool: EnginePool) -> None:
    first = start(pool, "plain")
    assert start(pool, "plain") is first
    first.alive = False
    assert start(pool, "plain") is not first


def test_ports_of_engines_that_have_not_bound_yet_are_not_given_again(pool: EnginePool) -> None:
    assert start(pool, "a").spec.port != start(pool, "b").spec.port


def test_close_stops_everything_and_then_says_what_failed(pool: EnginePool) -> None:
    first, second = start(pool, "a"), start(pool, "b")
    first.fails = True
    with pytest.raises(RuntimeError, match="does not stop"):
        pool.close()
    assert not first.alive and not second.alive


def test_keep_only_and_hand_over(pool: EnginePool) -> None:
    kept, stopped = start(pool, "kept"), start(pool, "stopped")
    pool.keep_only({"kept"})
    assert kept.alive and not stopped.alive
    assert pool.hand_over("kept") is kept
    pool.close()
    assert kept.alive


def test_only_an_engine_that_ended_is_revived(pool: EnginePool) -> None:
    first, other = start(pool, "a"), start(pool, "b")
    assert pool.at(first.url) is first and pool.at("http://nowhere") is None
    assert pool.revive(first.url) is None and pool.revive("http://nowhere") is None
    first.alive = False
    again = pool.revive(first.url)
    assert again is not None and again.is_alive() and again.url == first.url
    assert pool.at(first.url) is again and pool.at(other.url) is other
