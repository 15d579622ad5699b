"""Quantizing, fine-tuning and publishing the tiny target."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.contracts import ChangeKind
from components.errors import TargetError
from components.settings import EngineSettings
from components.targets.changes import classify_change
from components.targets.finetune import finetune_target
from components.targets.finetune_process import finetune_in_process
from components.targets.fingerprint import describe_quantization, fingerprint_target
from components.targets.publish import publish_target, read_published
from components.targets.quantize import quantize_int8_w8a8, quantize_weight

ENGINE = EngineSettings()
TEXTS = [
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nGood day to you, my dear "
    "friend.<|im_end|>\n"
] * 8


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than they give at this size, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kinds(old: Path, new: Path) -> tuple[ChangeKind, ...]:
    return classify_change(
        fingerprint_target(old, engine=ENGINE), fingerprint_target(new, engine=ENGINE)
    ).kinds


def test_a_weight_is_restored_within_half_a_step() -> None:
    weight_OI = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    weight_OI[3] = 0
    quantized_OI, scale_O1 = quantize_weight(weight_OI)
    assert quantized_OI.dtype is torch.int8
    assert scale_O1.shape == (16, 1)
    error_OI = (quantized_OI * scale_O1 - weight_OI).abs()
    assert bool((error_OI <= scale_O1 / 2 + 1e-7).all())
    rows = [row for row in range(16) if row != 3]
    assert quantized_OI.abs().amax(dim=1)[rows].tolist() == [127] * 15
    assert not quantized_OI[3].any()


def test_every_linear_but_the_head_is_quantized(tiny_target: Path, tmp_path: Path) -> None:
    quantized = quantize_int8_w8a8(tiny_target, tmp_path / "int8")
    old, new = (
        load_file(tiny_target / "model.safetensors"),
        load_file(quantized / "model.safetensors"),
    )
    projections = {name for name in old if name.endswith("_proj.weight")}
    assert len(projections) == 4 * 7
    assert set(new) == set(old) | {f"{name}_scale" for name in projections}
    assert {name for name, tensor in new.items() if tensor.dtype is torch.int8} == projections
    assert torch.equal(new["model.embed_tokens.weight"], old["model.embed_tokens.weight"])
    assert describe_quantization(quantized) == "compressed-tensors int-quantized W8A8"
    assert kinds(tiny_target, quantized) == (ChangeKind.QUANTIZATION,)
    with pytest.raises(TargetError, match="quantized already"):
        quantize_int8_w8a8(quantized, tmp_path / "again")
    with pytest.raises(TargetError, match="exists already"):
        quantize_int8_w8a8(tiny_target, quantized)


def test_sharded_targets_stay_sharded(tiny_target: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    shutil.copytree(tiny_target, sharded)
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    weight_map = {
        name: f"model-{index % 2}.safetensors" for index, name in enumerate(sorted(tensors))
    }
    for file in set(weight_map.values()):
        save_file(
            {name: tensors[name] for name, where in weight_map.items() if where == file},
            sharded / file,
        )
    (sharded / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    whole = quantize_int8_w8a8(tiny_target, tmp_path / "whole")
    parts = quantize_int8_w8a8(sharded, tmp_path / "parts")
    assert fingerprint_target(whole, engine=ENGINE) == fingerprint_target(parts, engine=ENGINE)
    tuned = tmp_path / "tuned"
    finetune_target(
        sharded, tuned, num_steps=1, learning_rate=1e-3, texts=TEXTS, tokens_per_step=64
    )
    assert sorted(p.name for p in tuned.glob("*.safetensors")) == [
        "model-0.safetensors",
        "model-1.safetensors",
    ]


def test_a_mixture_of_experts_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_target, tmp_path / "moe"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_local_experts": 8}))
    with pytest.raises(TargetError, match="mixture of experts"):
        quantize_int8_w8a8(source, tmp_path / "int8")


def test_a_fine_tune_learns_its_texts_and_is_repeatable(tiny_target: Path, tmp_path: Path) -> None:
    settings = {
        "num_steps": 16,
        "learning_rate": 5e-3,
        "texts": TEXTS,
        "seed": 1,
        "tokens_per_step": 64,
    }
    losses = finetune_target(tiny_target, tmp_path / "a", **settings)
    assert len(losses) == 16
    assert losses[-1] < losses[0] / 2
    assert kinds(tiny_target, tmp_path / "a") == (ChangeKind.WEIGHTS,)
    finetune_target(tiny_target, tmp_path / "b", **settings)
    assert kinds(tmp_path / "a", tmp_path / "b") == (ChangeKind.NONE,)


def test_only_the_last_layers_change_when_asked(tiny_target: Path, tmp_path: Path) -> None:
    finetune_target(
        tiny_target,
        tmp_path / "t",
        num_steps=2,
        learning_rate=1e-2,
        texts=TEXTS,
        tokens_per_step=64,
        num_layers=1,
    )
    old = load_file(tiny_target / "model.safetensors")
    new = load_file(tmp_path / "t" / "model.safetensors")
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed
    assert all(name.startswith(("model.layers.3.", "model.norm.")) for name in changed)


def test_a_failed_fine_tune_leaves_nothing(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="too little text"):
        finetune_target(tiny_target, tmp_path / "t", num_steps=1, learning_rate=1e-3, texts=["hi"])
    with pytest.raises(TargetError, match="cannot train so many layers"):
        finetune_target(
            tiny_target,
            tmp_path / "t",
            num_steps=1,
            learning_rate=1e-3,
            texts=TEXTS,
            num_layers=9,
            tokens_per_step=64,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_fine_tune_in_a_process_of_its_own_reports_and_fails_in_words(
    tiny_target: Path, tmp_path: Path
) -> None:
    told: list[tuple[str, int, int]] = []
    losses = finetune_in_process(
        tiny_target, tmp_path / "t", num_steps=4, learning_rate=5e-3, texts=TEXTS * 40,
        progress=lambda *word: told.append(word),
    )  # fmt: skip
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert told[-1][1:] == (4, 4)
    assert kinds(tiny_target, tmp_path / "t") == (ChangeKind.WEIGHTS,)
    with pytest.raises(TargetError, match=r"the fine-tune failed.*too little text"):
        finetune_in_process(
            tiny_target, tmp_path / "u", num_steps=1, learning_rate=1e-3, texts=["hi"]
        )
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_publishing_swaps_in_one_step(tiny_target: Path, tmp_path: Path) -> None:
    targets = [Path(shutil.copytree(tiny_target, tmp_path / name)) for name in ("one", "two")]
    watched = tmp_path / "watch" / "current"
    with pytest.raises(TargetError, match="no target is published"):
        read_published(watched)
    publish_target(targets[0], watched=watched)
    stop = threading.Event()
    seen = set()

    def read() -> None:
        while not stop.is_set():
            seen.add(read_published(watched))

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(200):
        publish_target(targets[turn % 2], watched=watched)
    stop.set()
    reader.join()
    assert seen <= set(targets)
    assert read_published(watched) == targets[1]
    assert list(watched.parent.iterdir()) == [watched]


def test_publishing_refuses_what_cannot_be_served(tiny_target: Path, tmp_path: Path) -> None:
    watched = tmp_path / "current"
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match="has no config"):
        publish_target(tmp_path / "empty", watched=watched)
    watched.mkdir()
    with pytest.raises(TargetError, match="not a symlink"):
        publish_target(tiny_target, watched=watched)
    watched.rmdir()
    watched.symlink_to(tmp_path / "gone")
    with pytest.raises(TargetError, match="is gone"):
        read_published(watched)
