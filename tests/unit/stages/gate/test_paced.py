"""What a report may lack because the recipe lets the machine's pace choose amounts, and what it may
not.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from components.settings import PaceSettings, load_recipe
from components.stages.gate.paced import as_paced

DEMO = load_recipe("demo")
RECIPE = DEMO.model_copy(
    update={
        "pace": PaceSettings(ends_within_s=1000, min_prompts_per_slice=8),
        "evaluation": DEMO.evaluation.model_copy(
            update={
                "slices": {"mt_bench": 16, "humaneval": 8},
                "speed_requests_in_flight": (1, 4, 8),
            }
        ),
    }
)


def report(mt_bench: int, humaneval: int, *, loads: tuple[int, ...], excluded: int = 0) -> Any:
    names = [f"mt_bench/{n}" for n in range(mt_bench)] + [
        f"humaneval/{n}" for n in range(humaneval)
    ]
    candidate = SimpleNamespace(
        prompts=[SimpleNamespace(prompt_id=name) for name in names],
        speed=[SimpleNamespace(requests_in_flight=load) for load in loads],
    )
    return SimpleNamespace(
        arms={"candidate": candidate},
        excluded={f"mt_bench/x{n}": "too long" for n in range(excluded)},
    )


def asked(recipe: Any, about: Any) -> tuple[dict[str, int], tuple[int, ...]]:
    paced = as_paced(recipe, about)
    return dict(paced.evaluation.slices), paced.evaluation.speed_requests_in_flight


def test_fewer_prompts_and_loads_within_what_the_pace_gives_up() -> None:
    assert asked(RECIPE, report(12, 8, loads=(1,))) == ({"mt_bench": 12, "humaneval": 8}, (1,))
    assert asked(RECIPE, report(11, 8, loads=(1, 4, 8), excluded=1)) == (
        {"mt_bench": 12, "humaneval": 8},
        (1, 4, 8),
    )


def test_never_less_than_the_minimum_nor_more_than_the_recipe() -> None:
    assert asked(RECIPE, report(3, 0, loads=())) == ({"mt_bench": 8, "humaneval": 8}, (1,))
    assert asked(RECIPE, report(40, 40, loads=(1, 4, 8, 16))) == (
        {"mt_bench": 16, "humaneval": 8},
        (1, 4, 8),
    )


def test_a_recipe_without_a_pace_asks_for_all() -> None:
    fixed = RECIPE.model_copy(update={"pace": None})
    assert as_paced(fixed, report(8, 8, loads=(1,))) is fixed
