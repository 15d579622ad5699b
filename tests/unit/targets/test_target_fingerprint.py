"""Equal content gives equal digests; every kind of change moves its own part and no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.contracts import TargetFingerprint
from components.errors import TargetError
from components.settings import EngineSettings
from components.targets import fingerprint as module
from components.targets.fingerprint import (
    describe_quantization,
    fingerprint_target,
    make_target_ref,
)

ENGINE = EngineSettings()


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


def edit_json(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))


def changed_parts(old: TargetFingerprint, new: TargetFingerprint) -> set[str]:
    return {
        part for part in TargetFingerprint.model_fields if getattr(old, part) != getattr(new, part)
    }


def test_sharding_names_and_folder_do_not_matter(target: Path) -> None:
    before = fingerprint_target(target, engine=ENGINE)
    tensors = load_file(target / "model.safetensors")
    names = sorted(tensors)
    halves = {"a-00001.safetensors": names[::2], "b-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file(
            {name: tensors[name].clone() for name in part},
            target / file,
            metadata={"saved_by": "another"},
        )
    (target / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    moved = target.rename(target.with_name("elsewhere"))
    assert fingerprint_target(moved, engine=ENGINE) == before


def test_one_bit_of_one_weight_is_seen(target: Path) -> None:
    before = fingerprint_target(target, engine=ENGINE)
    tensors = load_file(target / "model.safetensors")
    tensors["model.norm.weight"].view(torch.int16)[0] ^= 1
    save_file(tensors, target / "model.safetensors")
    assert changed_parts(before, fingerprint_target(target, engine=ENGINE)) == {"weights"}


@pytest.mark.parametrize(
    ("file", "changes", "parts"),
    [
        (
            "config.json",
            {"transformers_version": "9.9", "_name_or_path": "x", "use_cache": False},
            set(),
        ),
        ("config.json", {"rms_norm_eps": 1e-3}, {"weights"}),
        ("config.json", {"num_key_value_heads": 2}, {"weights"}),
        ("config.json", {"quantization_config": {"quant_method": "fp8"}}, {"quantization"}),
        ("config.json", {"eos_token_id": 0}, {"tokenizer"}),
        ("tokenizer_config.json", {"model_max_length": 17, "tokenizer_class": "Other"}, set()),
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}, {"tokenizer"}),
        ("tokenizer.json", {"padding": {"length": 3}, "version": "2.0"}, set()),
        ("tokenizer.json", {"normalizer": {"type": "NFC"}}, {"tokenizer"}),
    ],
)
def test_edits_move_their_own_part(
    target: Path, file: str, changes: dict[str, Any], parts: set[str]
) -> None:
    before = fingerprint_target(target, engine=ENGINE)
    edit_json(target / file, **changes)
    assert changed_parts(before, fingerprint_target(target, engine=ENGINE)) == parts


def test_rotary_settings_in_either_spelling(target: Path) -> None:
    edit_json(
        target / "config.json",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rope_theta=...,
    )
    new_spelling = fingerprint_target(target, engine=ENGINE)
    edit_json(target / "config.json", rope_parameters=..., rope_theta=10000, rope_scaling=None)
    assert fingerprint_target(target, engine=ENGINE) == new_spelling
    edit_json(target / "config.json", rope_theta=500000)
    assert changed_parts(new_spelling, fingerprint_target(target, engine=ENGINE)) == {"weights"}


def test_chat_template_and_merge_spelling(target: Path) -> None:
    before = fingerprint_target(target, engine=ENGINE)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").unlink()
    edit_json(target / "tokenizer_config.json", chat_template=template)
    assert fingerprint_target(target, engine=ENGINE) == before
    edit_json(target / "tokenizer_config.json", chat_template=template + " ")
    assert changed_parts(before, fingerprint_target(target, engine=ENGINE)) == {"tokenizer"}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"dtype": "float32"}, {"serving"}),
        ({"kv_cache_dtype": "fp8"}, {"serving"}),
        ({"max_model_len": 512}, {"serving"}),
        ({"extra_args": ("--quantization", "fp8")}, {"serving"}),
        ({"extra_args": ("--seed", "1")}, set()),
        (
            {"max_num_seqs": 3, "kv_cache_gib": 9.0, "startup_timeout_s": 1.0, "device": "cpu"},
            set(),
        ),
    ],
)
def test_only_numeric_engine_settings_count(
    tiny_target: Path, changes: dict[str, Any], parts: set[str]
) -> None:
    before = fingerprint_target(tiny_target, engine=ENGINE)
    after = fingerprint_target(tiny_target, engine=ENGINE.model_copy(update=changes))
    assert changed_parts(before, after) == parts


def test_the_cache_is_used_and_never_stale(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir = tmp_path / "cache"
    before = fingerprint_target(target, engine=ENGINE, cache_dir=cache_dir)
    with monkeypatch.context() as patch:
        patch.setattr(module, "hash_tensors", lambda file: pytest.fail("the cache was not used"))
        assert fingerprint_target(target, engine=ENGINE, cache_dir=cache_dir) == before
    file = target / "model.safetensors"
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    with file.open(
        "r+b"
    ) as handle:  # same size, same inode; the modification time is set back afterwards
        handle.seek(-1, 2)
        last = handle.read(1)
        handle.seek(-1, 2)
        handle.write(bytes([last[0] ^ 1]))
    import os

    os.utime(file, ns=times)
    assert changed_parts(
        before, fingerprint_target(target, engine=ENGINE, cache_dir=cache_dir)
    ) == {"weights"}
    assert not [
        p
        for p in target.iterdir()
        if p.name not in {f.name for f in target.glob("*.j*")} | {file.name}
    ]


def test_incomplete_targets_are_named(target: Path, tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(TargetError) as caught:
            make_target_ref("tiny", path=path, source="test", engine=ENGINE)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "does not exist" in message(tmp_path / "nowhere")
    template = (target / "chat_template.jinja").read_bytes()
    (target / "chat_template.jinja").unlink()
    assert "no chat template" in message(target)
    (target / "chat_template.jinja").write_bytes(template)
    weights = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(weights[:-10])
    assert "cut short" in message(target)
    (target / "model.safetensors").write_bytes(b"not safetensors at all")
    assert "not a safetensors file" in message(target)
    (target / "model.safetensors").write_bytes(b"")
    assert "not a safetensors file" in message(target)
    (target / "model.safetensors").unlink()
    assert "has no safetensors" in message(target)
    (target / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "gone.safetensors"}})
    )
    assert "gone.safetensors" in message(target)
    (target / "config.json").write_text("{broken")
    assert "cannot be read" in message(target)
    (target / "config.json").unlink()
    assert "has no config.json" in message(target)


def test_a_tensor_in_two_files_is_refused(target: Path) -> None:
    shutil.copyfile(target / "model.safetensors", target / "stale.safetensors")
    with pytest.raises(TargetError, match="holds a tensor twice"):
        fingerprint_target(target, engine=ENGINE)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "none"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "awq W4"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4}, "input_activations": None}
                },
            },
            "compressed-tensors pack-quantized W4A16",
        ),
    ],
)
def test_quantization_in_words(target: Path, config: dict[str, Any] | None, words: str) -> None:
    edit_json(target / "config.json", quantization_config=config)
    assert describe_quantization(target) == words
