"""Checkpoints: complete or absent, bound by content, re-bound without touching weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from components.contracts import (
    CALIBRATION_FILE,
    Calibration,
    CheckpointRef,
    TargetFingerprint,
    TargetRef,
)
from components.drafter import checkpoint as module
from components.drafter.build import build_drafter, load_drafter, trainable_state
from components.drafter.checkpoint import (
    export_checkpoint,
    load_checkpoint_ref,
    read_calibration,
    rebind_checkpoint,
    require_bound,
)
from components.drafter.confidence.calibration import fit_calibration
from components.drafter.start import read_lm_head
from components.drafter.vocabulary import build_draft_vocabulary
from components.errors import CheckpointError, FingerprintMismatchError
from components.settings import DrafterSettings

SETTINGS = DrafterSettings(num_layers=1, block_size=4, markov_rank=8, draft_vocab_size=64)
FINGERPRINT = TargetFingerprint(
    weights="a" * 64, quantization="b" * 64, tokenizer="c" * 64, serving="d" * 64
)


def target_ref(path: Path, **parts: str) -> TargetRef:
    return TargetRef(
        name="tiny",
        path=str(path),
        source="test",
        fingerprint=FINGERPRINT.model_copy(update=parts),
        quantization="none",
    )


def calibration() -> Calibration:
    draws = np.random.default_rng(0)
    logits_NK = draws.normal(size=(400, 3))
    return fit_calibration(
        logits_NK, draws.random((400, 3)) < 0.6, np.arange(400) // 20, target_weights="a" * 64
    )


def export(
    target: Path, destination: Path, *, step: int = 3, calibration: Calibration | None = None
) -> tuple[object, CheckpointRef]:
    counts_V = torch.ones(read_lm_head(target).shape[0], dtype=torch.long)
    model = build_drafter(
        SETTINGS,
        target_path=target,
        aux_layer_ids=(1, 3),
        draft_vocab=build_draft_vocabulary(counts_V, size=64, min_coverage=0.01),
        seed=0,
    )
    ref = export_checkpoint(
        model,
        destination,
        target=target_ref(target),
        settings=SETTINGS,
        dataset_digest="e" * 64,
        step=step,
        num_trained_tokens=99,
        parent_digest=None,
        expected_acceptance_length=1.25,
        extra={"training": {"seed": 0}},
        calibration=calibration,
    )
    return model, ref


@pytest.mark.parametrize("is_pruned", [True, False])
def test_an_eagle3_checkpoint_is_complete_for_vllm_and_for_speculators(
    tiny_target: Path, tmp_path: Path, is_pruned: bool
) -> None:
    settings = SETTINGS.model_copy(update={"algorithm": "eagle3"})
    counts_V = torch.ones(read_lm_head(tiny_target).shape[0], dtype=torch.long)
    vocabulary = build_draft_vocabulary(counts_V, size=64, min_coverage=0.01) if is_pruned else None
    model = build_drafter(
        settings, target_path=tiny_target, aux_layer_ids=(1, 3), draft_vocab=vocabulary, seed=0
    )
    ref = export_checkpoint(
        model,
        tmp_path / "eagle3",
        target=target_ref(tiny_target),
        settings=settings,
        dataset_digest=None,
        step=0,
        num_trained_tokens=0,
        parent_digest=None,
        expected_acceptance_length=None,
        extra={},
    )
    saved = set(load_file(Path(ref.path) / "model.safetensors"))
    assert saved - {"d2t", "t2d"} == {
        *trainable_state(model),
        "embed_tokens.weight",
        "lm_head.weight",
    }
    assert ({"d2t", "t2d"} <= saved) is is_pruned
    config = json.loads((Path(ref.path) / "config.json").read_text())
    assert (ref.algorithm, ref.num_draft_tokens, config["norm_before_residual"]) == (
        "eagle3",
        3,
        False,
    )
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    loaded = load_drafter(Path(ref.path), target_path=tiny_target).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


def test_an_exported_checkpoint_holds_everything_and_reads_back(
    tiny_target: Path, tmp_path: Path
) -> None:
    model, ref = export(tiny_target, tmp_path / "drafter")
    assert load_checkpoint_ref(tmp_path / "drafter") == ref
    assert (ref.num_draft_tokens, ref.step, ref.num_trained_tokens) == (3, 3, 99)
    weights = load_file(tmp_path / "drafter" / "model.safetensors")
    assert {"lm_head.weight", "d2t", "t2d"} <= set(weights) and "embed_tokens.weight" not in weights
    for name, value in trainable_state(model).items():
        assert torch.equal(weights[name], value)
    provenance = json.loads((tmp_path / "drafter" / "provenance.json").read_text())
    assert provenance["extra"]["drafter"]["markov_rank"] == 8 and provenance["versions"]["torch"]
    assert "1.250" in (tmp_path / "drafter" / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_no_code_is_shipped_with_the_weights(tiny_target: Path, tmp_path: Path) -> None:
    export(tiny_target, tmp_path / "drafter")
    assert not list((tmp_path / "drafter").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "drafter" / "config.json").read_text())


def test_a_second_export_replaces_the_first(tiny_target: Path, tmp_path: Path) -> None:
    export(tiny_target, tmp_path / "drafter")
    _, second = export(tiny_target, tmp_path / "drafter", step=8)
    assert load_checkpoint_ref(tmp_path / "drafter").step == second.step == 8
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_an_export_that_fails_leaves_what_was_there(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = export(tiny_target, tmp_path / "drafter")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_bind", full)
    with pytest.raises(CheckpointError, match="No space left"):
        export(tiny_target, tmp_path / "drafter", step=8)
    assert load_checkpoint_ref(tmp_path / "drafter") == first
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


@pytest.mark.parametrize("damage", ["marker", "weights", "config", "fingerprint"])
def test_damage_is_found(tiny_target: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "drafter"
    export(tiny_target, folder)
    if damage == "marker":
        (folder / "checkpoint.json").unlink()
    elif damage == "weights":
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x55")
    elif damage == "config":
        (folder / "config.json").write_text("{}")
    else:
        (folder / "target_fingerprint.json").unlink()
    with pytest.raises(CheckpointError):
        load_checkpoint_ref(folder)


def test_a_checkpoint_is_refused_on_another_target(tiny_target: Path, tmp_path: Path) -> None:
    export(tiny_target, tmp_path / "drafter")
    require_bound(tmp_path / "drafter", FINGERPRINT)
    other = FINGERPRINT.model_copy(update={"weights": "f" * 64})
    with pytest.raises(
        FingerprintMismatchError, match=r"weights aaaaaaaaaaaa.*weights ffffffffffff"
    ):
        require_bound(tmp_path / "drafter", other)


def test_rebinding_keeps_the_weights_and_names_the_parent(
    tiny_target: Path, tmp_path: Path
) -> None:
    _, old = export(tiny_target, tmp_path / "drafter")
    target = target_ref(tmp_path / "quantized", weights="9" * 64, quantization="8" * 64)
    new = rebind_checkpoint(old, target=target, destination=tmp_path / "rebound")
    assert load_checkpoint_ref(tmp_path / "rebound") == new
    assert new.parent_digest == old.digest != new.digest
    assert new.expected_acceptance_length is None
    require_bound(tmp_path / "rebound", target.fingerprint)
    weights = [
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("drafter", "rebound")
    ]
    assert weights[0] == weights[1]
    config = json.loads((tmp_path / "rebound" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "quantized")


def test_the_calibration_travels_with_the_checkpoint(tiny_target: Path, tmp_path: Path) -> None:
    fitted = calibration()
    _, old = export(tiny_target, tmp_path / "drafter", calibration=fitted)
    assert read_calibration(tmp_path / "drafter") == fitted
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert (
        f"to {fitted.after.ece:.4f}" in card
        and "400 blocks of 20" in card
        and "not of this one" not in card
    )
    rebind_checkpoint(
        old, target=target_ref(tiny_target, weights="9" * 64), destination=tmp_path / "rebound"
    )
    assert read_calibration(tmp_path / "rebound") == fitted
    assert "not of this one" in (tmp_path / "rebound" / "README.md").read_text()


def test_the_digest_covers_the_calibration(tiny_target: Path, tmp_path: Path) -> None:
    _, without = export(tiny_target, tmp_path / "without")
    assert read_calibration(tmp_path / "without") is None
    assert "calibration" not in (tmp_path / "without" / "README.md").read_text()
    folder = tmp_path / "drafter"
    _, ref = export(tiny_target, folder, calibration=calibration())
    assert ref.digest != without.digest
    stored = (folder / CALIBRATION_FILE).read_text()
    (folder / CALIBRATION_FILE).unlink()
    with pytest.raises(CheckpointError, match="changed after it was written"):
        load_checkpoint_ref(folder)
    (folder / CALIBRATION_FILE).write_text(stored.replace("temperatures", "temperature"))
    with pytest.raises(CheckpointError, match=r"calibration cannot be read.*temperature.*Restore"):
        read_calibration(folder)


def test_rebinding_a_changed_checkpoint_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    _, old = export(tiny_target, tmp_path / "drafter")
    stale = old.model_copy(update={"digest": "0" * 64})
    with pytest.raises(CheckpointError, match="not the one referred to"):
        rebind_checkpoint(stale, target=target_ref(tiny_target), destination=tmp_path / "rebound")
    assert not (tmp_path / "rebound").exists()
