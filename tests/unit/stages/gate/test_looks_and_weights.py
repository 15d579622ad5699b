"""Looks are counted, by report; a re-bound drafter is told from another one by its weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.contracts import CheckpointRef, TargetFingerprint, Verdict, now_utc
from components.errors import ConfigError
from components.stages.gate.looks import next_look, record_look
from components.stages.gate.same_weights import champion_to_beat

TARGET = TargetFingerprint(weights="w", quantization="q", tokenizer="t", serving="s")
OTHER = TARGET.model_copy(update={"weights": "v"})


def checkpoint(folder: Path, *, digest: str, weights: bytes = b"weights") -> CheckpointRef:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    return CheckpointRef(
        path=str(folder), digest=digest, algorithm="dspark", fingerprint=TARGET, num_draft_tokens=4
    )


def looked(
    state: Path, digest: str, *, candidate: str, look: int, fingerprint: TargetFingerprint = TARGET
) -> None:
    report: Any = SimpleNamespace(
        digest=digest,
        look=look,
        created_at=now_utc(),
        target=SimpleNamespace(fingerprint=fingerprint),
    )
    decision: Any = SimpleNamespace(candidate_digest=candidate, verdict=Verdict.INCONCLUSIVE)
    record_look(state, report, decision)


def test_each_report_of_a_candidate_on_a_target_is_a_look(tmp_path: Path) -> None:
    candidate = checkpoint(tmp_path / "c", digest="c" * 64)
    assert next_look(tmp_path, TARGET, candidate) == 1
    looked(tmp_path, "first", candidate="c" * 64, look=1)
    looked(tmp_path, "first", candidate="c" * 64, look=1)  # decided again on the same report
    assert next_look(tmp_path, TARGET, candidate) == 2
    looked(tmp_path, "second", candidate="c" * 64, look=2)
    looked(tmp_path, "elsewhere", candidate="c" * 64, look=1, fingerprint=OTHER)
    looked(tmp_path, "another's", candidate="d" * 64, look=1)
    assert next_look(tmp_path, TARGET, candidate) == 3


def test_a_damaged_list_of_looks_is_told_not_forgotten(tmp_path: Path) -> None:
    candidate = checkpoint(tmp_path / "c", digest="c" * 64)
    looked(tmp_path, "first", candidate="c" * 64, look=1)
    (path,) = (tmp_path / "looks").iterdir()
    path.write_text(path.read_text() + "{half")
    with pytest.raises(ConfigError, match="is not a list of looks"):
        next_look(tmp_path, TARGET, candidate)


def test_the_champion_to_beat_is_another_drafter(tmp_path: Path) -> None:
    champion = checkpoint(tmp_path / "champion", digest="a" * 64)
    rebound = checkpoint(tmp_path / "rebound", digest="b" * 64)
    retrained = checkpoint(tmp_path / "retrained", digest="c" * 64, weights=b"others")
    assert champion_to_beat(retrained, None) is None
    assert champion_to_beat(champion, champion) is None
    assert champion_to_beat(rebound, champion) is None
    assert champion_to_beat(retrained, champion) == champion.digest
