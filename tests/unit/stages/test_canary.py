"""Which engine outlives a run whose canary did not promote: the one that traffic fell back to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.stages import canary

NEW, OLD = "fingerprint of the new target", "fingerprint of the old one"


def release(fingerprint: str, digest: str) -> Any:
    return SimpleNamespace(
        target=SimpleNamespace(fingerprint=fingerprint), checkpoint=SimpleNamespace(digest=digest)
    )


class Production:
    """The engine recorded as in production."""

    def __init__(self, fingerprint: str, digest: str | None) -> None:
        self.pair = (fingerprint, digest)

    def serves(self, *, fingerprint: str, checkpoint_digest: str | None) -> bool:
        return self.pair == (fingerprint, checkpoint_digest)


def kept(
    monkeypatch: pytest.MonkeyPatch, production: Production | None, champion: Any
) -> list[str]:
    """Keys of the engines handed over after a rollback of a release on the new target."""
    keys: list[str] = []
    run = SimpleNamespace(
        engines=SimpleNamespace(hand_over=keys.append), state_dir=Path("state"), supervisor_pid=1
    )
    monkeypatch.setattr(
        canary, "ProductionEngine", SimpleNamespace(find=lambda _folder: production)
    )
    monkeypatch.setattr(canary, "put_into_production", lambda *_args, **_kwargs: None)
    monkeypatch.setattr(canary, "released_key", lambda one: f"released {one.checkpoint.digest}")
    monkeypatch.setattr(canary, "plain_key", lambda _target: "plain")
    canary._keep_baseline(run, release(NEW, "challenger"), champion)  # type: ignore[arg-type]
    return keys


def test_no_draft_is_kept_where_nothing_served_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(monkeypatch, None, None) == ["plain"]


def test_no_draft_replaces_an_engine_of_the_old_target(monkeypatch: pytest.MonkeyPatch) -> None:
    champion = release(OLD, "champion")
    assert kept(monkeypatch, Production(OLD, "champion"), champion) == ["plain"]


def test_a_champion_that_was_started_for_the_canary_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kept(monkeypatch, None, release(NEW, "champion")) == ["released champion"]


def test_the_engine_in_production_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(monkeypatch, Production(NEW, "champion"), release(NEW, "champion")) == []
