"""Recipes: what is refused, how it is said, and that the shipped ones are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from components.errors import ConfigError
from components.settings import CONFIGS_DIR, load_recipe, load_services

RECIPES = sorted(path.stem for path in CONFIGS_DIR.glob("*.yaml") if path.stem != "services")


def changed_demo(folder: Path, **changes: Any) -> Path:
    raw = yaml.safe_load((CONFIGS_DIR / "demo.yaml").read_text())
    for key, value in changes.items():
        raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_load_with_every_budget(name: str) -> None:
    raw = yaml.safe_load((CONFIGS_DIR / f"{name}.yaml").read_text())
    for size in (None, *raw.get("sizes", {})):
        assert load_recipe(name, size=size).target.name


def test_shipped_services_load() -> None:
    assert load_services().state_dir == ".dspark"


def test_a_budget_changes_only_what_it_names() -> None:
    plain = load_recipe("demo")
    full = load_recipe("demo", size="full")
    assert full.curation.num_conversations > plain.curation.num_conversations
    assert full.curation.sources == plain.curation.sources


def test_a_mistyped_key_names_the_nearest_known_one(tmp_path: Path) -> None:
    path = changed_demo(tmp_path, training={"lerning_rate": 1e-3})
    with pytest.raises(
        ConfigError, match=r"unknown key training\.lerning_rate \(did you mean 'learning_rate'\?\)"
    ):
        load_recipe(path)


def test_a_mistyped_key_of_an_optional_section_names_the_nearest_one_too(tmp_path: Path) -> None:
    path = changed_demo(tmp_path, pace={"probe_stps": 2})
    with pytest.raises(ConfigError, match=r"pace\.probe_stps \(did you mean 'probe_steps'\?\)"):
        load_recipe(path)


def test_a_mistyped_key_in_a_budget_is_found_before_it_is_used(tmp_path: Path) -> None:
    path = changed_demo(tmp_path, sizes={"full": {"curation": {"num_convs": 3}}})
    with pytest.raises(ConfigError, match=r"size full.*unknown key curation\.num_convs"):
        load_recipe(path)


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"got dmo; expected a YAML file or one of demo, "):
        load_recipe("dmo")


def test_an_unknown_budget_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"got fll; expected full, "):
        load_recipe("demo", size="fll")


def test_prompts_and_answers_must_fit_the_engine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"exceeds engine\.max_model_len"):
        load_recipe(changed_demo(tmp_path, engine={"max_model_len": 128}))


def test_start_layers_must_match_the_depth(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one target layer per draft layer"):
        load_recipe(changed_demo(tmp_path, drafter={"start_layers": [29]}))


def test_a_source_says_what_it_needs(tmp_path: Path) -> None:
    path = changed_demo(tmp_path, target={"source": "huggingface"})
    with pytest.raises(ConfigError, match="source 'huggingface' needs repo_id"):
        load_recipe(path)


def test_broken_yaml_is_one_message(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("name: [unclosed\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml is not valid YAML"):
        load_recipe(path)


def test_a_preset_lies_beneath_the_recipe() -> None:
    """The published recipe, in the conventions of `configs/presets/paper.yaml`."""
    recipe = load_recipe("qwen3-8b")
    drafter, training = recipe.drafter, recipe.training
    assert (drafter.num_layers, drafter.block_size - 1, drafter.markov_rank) == (5, 7, 256)
    # Tv is half of L1.
    assert training.loss == {"ce": 0.1, "tv": 1.8} and training.loss_gamma == 4.0
    assert (training.learning_rate, training.warmup_share, training.num_epochs) == (6e-4, 0.04, 10)
    assert training.max_grad_norm == 1.0 and training.weight_decay == 0.0
    # The recipe's own.
    assert drafter.draft_vocab_size == 32000 and training.tokens_per_step == 8192


def test_a_recipe_replaces_the_loss_of_its_preset(tmp_path: Path) -> None:
    path = changed_demo(tmp_path, training={"loss": {"ce": 1.0}})
    assert load_recipe(path).training.loss == {"ce": 1.0}  # the preset has kl


def test_an_unknown_preset_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such training\.preset.*papr.*cpu, paper"):
        load_recipe(changed_demo(tmp_path, training={"preset": "papr"}))


def test_slices_are_numbers_or_sources(tmp_path: Path) -> None:
    slices = {"mt_bench": 4, "ours": {"kind": "file", "path": "p.jsonl", "num_prompts": 40}}
    settings = load_recipe(changed_demo(tmp_path, evaluation={"slices": slices})).evaluation
    assert settings.num_prompts_by_slice == {"mt_bench": 4, "ours": 40}
    assert (
        list(settings.own_slices) == ["ours"]
        and settings.own_slices["ours"].source("ours").path == "p.jsonl"
    )


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ({"ours": {"kind": "file", "num_prompts": 4}}, "kind 'file' needs a path"),
        ({"ours": {"kind": "huggingface", "num_prompts": 4}}, "kind 'huggingface' needs a repo_id"),
        (
            {"ours": {"kind": "file", "paht": "p", "num_prompts": 4}},
            r"unknown key evaluation\.slices\.ours\.source\.paht \(did you mean 'path'",
        ),
        ({"ours": {"kind": "file", "path": "p", "num_prompts": 0}}, "greater than or equal to 1"),
        ({"o/urs": 4}, "is no name of letters"),
    ],
)
def test_slices_that_cannot_be(tmp_path: Path, slices: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(changed_demo(tmp_path, evaluation={"slices": slices, "max_tokens": 32}))


def test_a_warm_prefix_must_fit_into_the_context(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leaves no place for a question"):
        load_recipe(changed_demo(tmp_path, evaluation={"warm_prefix": {"prefix_tokens": 1000}}))
