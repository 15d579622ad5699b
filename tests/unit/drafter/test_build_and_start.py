"""Building drafters: shape, what is frozen and shared, and the start from the target's layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.drafter.build import (
    build_drafter,
    choose_mask_token_id,
    load_trainable,
    trainable_state,
)
from components.drafter.start import TensorFiles, read_lm_head
from components.drafter.vocabulary import build_draft_vocabulary
from components.errors import ConfigError, TargetError
from components.settings import DrafterSettings

AUX = (1, 2, 3)
SETTINGS = DrafterSettings(num_layers=2, block_size=4, markov_rank=8, draft_vocab_size=64)


def vocabulary(target: Path) -> object:
    counts_V = torch.zeros(read_lm_head(target).shape[0], dtype=torch.long)
    counts_V[100:200] = 3
    return build_draft_vocabulary(counts_V, size=64, min_coverage=0.1)


def build(
    target: Path, settings: DrafterSettings = SETTINGS, *, pruned: bool = True, seed: int = 0
) -> object:
    draft_vocab = vocabulary(target) if pruned else None
    return build_drafter(
        settings, target_path=target, aux_layer_ids=AUX, draft_vocab=draft_vocab, seed=seed
    )


def test_a_dspark_drafter_shares_the_targets_frozen_parts(tiny_target: Path) -> None:
    model = build(tiny_target)
    weights = TensorFiles(tiny_target)
    head_VH = read_lm_head(tiny_target).float()
    kept = vocabulary(tiny_target).token_ids_D
    assert model.config.sample_from_anchor is False
    assert torch.equal(model.lm_head.weight, head_VH[kept])
    assert torch.equal(model.embed_tokens.weight, weights.read("embed_tokens.weight").float())
    assert torch.equal(model.verifier_norm.weight, weights.read("norm.weight").float())
    frozen = {
        "embed_tokens.weight",
        "lm_head.weight",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    }
    assert not frozen & set(trainable_state(model))
    assert {"markov_head.markov_w1.weight", "confidence_head.proj.weight", "fc.weight"} <= set(
        trainable_state(model)
    )


def test_heads_can_be_switched_off_and_dflash_has_none(tiny_target: Path) -> None:
    bare = build(
        tiny_target,
        SETTINGS.model_copy(update={"markov_rank": 0, "confidence_head": False}),
        pruned=False,
    )
    assert bare.markov_head is None and bare.confidence_head is None
    dflash = build(tiny_target, SETTINGS.model_copy(update={"algorithm": "dflash"}))
    assert not hasattr(dflash, "markov_head") and dflash.config.sample_from_anchor is False
    eagle3 = build(tiny_target, SETTINGS.model_copy(update={"algorithm": "eagle3"}))
    assert eagle3.config.speculators_model_type == "eagle3"


def test_equal_seeds_give_equal_weights_and_leave_the_global_generator_alone(
    tiny_target: Path,
) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = build(tiny_target)
    second = build(tiny_target)
    other = build(tiny_target, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert not torch.equal(first.fc.weight, other.fc.weight)


def test_start_from_target_layers_copies_layers_norms_and_passes_one_slot(
    tiny_target: Path,
) -> None:
    settings = SETTINGS.model_copy(
        update={"start": "target_layers", "start_layers": (3, 1), "start_aux_slot": 1}
    )
    model = build(tiny_target, settings)
    weights = TensorFiles(tiny_target)
    for draft_layer, target_layer in zip(model.layers, (3, 1), strict=True):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm"):
            expected = weights.read(f"layers.{target_layer}.{name}.weight").float()
            assert torch.equal(draft_layer.get_submodule(name).weight, expected)
        assert torch.equal(
            draft_layer.self_attn.k_norm.weight,
            torch.ones_like(draft_layer.self_attn.k_norm.weight),
        )
    assert torch.equal(model.norm.weight, weights.read("norm.weight").float())
    states = torch.randn(5, 3, model.fc.weight.shape[0])
    assert torch.equal(model.fc(states.flatten(1)), states[:, 1])


def test_eagle3_starts_with_half_of_the_targets_projections_in_each_half(tiny_target: Path) -> None:
    settings = SETTINGS.model_copy(
        update={
            "algorithm": "eagle3",
            "start": "target_layers",
            "start_layers": (3, 1),
            "start_norm_scale": 0.5,
        }
    )
    model = build(tiny_target, settings)
    weights = TensorFiles(tiny_target)
    first, second = model.layers
    embedded, states = torch.randn(2, 5, model.fc.weight.shape[0])
    for name in ("q_proj", "k_proj", "v_proj"):
        expected = weights.read(f"layers.3.self_attn.{name}.weight").float()
        both = first.self_attn.get_submodule(name)(torch.cat([embedded, states], dim=-1))
        torch.testing.assert_close(both, (embedded + states) / 2 @ expected.T, rtol=1e-4, atol=1e-4)
        expected = weights.read(f"layers.1.self_attn.{name}.weight").float()
        assert torch.equal(second.self_attn.get_submodule(name).weight, expected)
    norm_H = weights.read("layers.3.input_layernorm.weight").float()
    assert torch.equal(first.hidden_norm.weight, norm_H) and torch.equal(
        first.input_layernorm.weight, norm_H
    )
    assert torch.equal(model.norm.weight, 0.5 * weights.read("norm.weight").float())
    aux = torch.randn(5, 3, model.fc.weight.shape[0])
    assert torch.equal(model.fc(aux.flatten(1)), aux[:, -1])


def test_eagle3_does_not_start_from_layers_with_head_norms_it_lacks(
    tiny_target: Path, tmp_path: Path
) -> None:
    for file in tiny_target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tiny_target / "model.safetensors")
    tensors["model.layers.3.self_attn.q_norm.weight"] = torch.ones(32)
    save_file(tensors, tmp_path / "model.safetensors")
    settings = SETTINGS.model_copy(
        update={
            "algorithm": "eagle3",
            "num_layers": 1,
            "start": "target_layers",
            "start_layers": (3,),
        }
    )
    with pytest.raises(ConfigError, match="q_norm"):
        build(tmp_path, settings)


@pytest.mark.parametrize(
    ("update", "aux", "message"),
    [
        ({}, (1, 9), "aux_layer_ids"),
        ({"start": "target_layers", "start_layers": (1, 4)}, AUX, "start_layers"),
        ({"start_aux_slot": 3}, AUX, "start_aux_slot"),
        ({"mask_token_id": 10**6}, AUX, "mask_token_id"),
    ],
)
def test_settings_that_do_not_fit_the_target_are_refused(
    tiny_target: Path, update: dict[str, object], aux: tuple[int, ...], message: str
) -> None:
    settings = SETTINGS.model_copy(update=update)
    with pytest.raises(ConfigError, match=message):
        build_drafter(
            settings, target_path=tiny_target, aux_layer_ids=aux, draft_vocab=None, seed=0
        )


def test_a_folder_without_a_config_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"config\.json"):
        build_drafter(SETTINGS, target_path=tmp_path, aux_layer_ids=AUX, draft_vocab=None, seed=0)


def test_the_mask_token_is_special_and_not_used_by_chats(tiny_target: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tiny_target))
    chosen = tokenizer.convert_ids_to_tokens(choose_mask_token_id(tiny_target))
    assert (
        chosen not in (tokenizer.eos_token, tokenizer.bos_token)
        and chosen not in tokenizer.chat_template
    )


def test_weights_of_another_shape_are_refused(tiny_target: Path) -> None:
    model = build(tiny_target)
    deeper = build(tiny_target, SETTINGS.model_copy(update={"num_layers": 3}))
    with pytest.raises(ConfigError, match="do not fit"):
        load_trainable(deeper, trainable_state(model), source="a test")
