"""Records: immutable, digested, written whole or not at all."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pydantic import ValidationError

from components.contracts import TargetFingerprint, is_held_out, write_atomic
from components.errors import ConfigError, EngineError

FINGERPRINT = TargetFingerprint(weights="a", quantization="b", tokenizer="c", serving="d")


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    path = FINGERPRINT.write(tmp_path / "fingerprint.json")
    assert TargetFingerprint.read(path) == FINGERPRINT
    assert TargetFingerprint.read(path).digest == FINGERPRINT.digest


def test_the_digest_follows_content() -> None:
    assert FINGERPRINT.model_copy(update={"weights": "x"}).digest != FINGERPRINT.digest


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        FINGERPRINT.weights = "x"  # type: ignore[misc]


@pytest.mark.parametrize("content", ["{}", '{"weights": 1}', "not json"])
def test_a_damaged_file_is_one_message(tmp_path: Path, content: str) -> None:
    (tmp_path / "record.json").write_text(content)
    with pytest.raises(ConfigError, match="is not a TargetFingerprint"):
        TargetFingerprint.read(tmp_path / "record.json")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_atomic(tmp_path / "file", "old")
    with pytest.raises(TypeError):
        write_atomic(path, 3)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_held_out_is_a_twentieth_and_ignores_case_and_space() -> None:
    share = sum(is_held_out(f"question number {index}") for index in range(4000)) / 4000
    assert share == pytest.approx(0.05, abs=0.012)
    assert is_held_out("Hello  World") == is_held_out("hello world")


def test_errors_cross_process_borders() -> None:
    error = EngineError("engine died", got="exit code 1", fix="Look at its log.")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (
        EngineError,
        "engine died; got exit code 1. Look at its log.",
    )
