"""What the flows of one run share of its pace: the recipe as chosen, the time that is left, the
limit on training.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest

from components.contracts import MachineProbe, now_utc
from components.pace.plan import make_plan, training_limit
from components.settings import Recipe, load_recipe
from tasks import training
from tasks.loop import Loop

PROBE = MachineProbe(
    engine_up_s=30,
    tokens_per_s={4: 80, 64: 320},
    prompt_tokens_per_s=1400,
    training_step_s=0.4,
    trainer_up_s=20,
    duration_s=40,
)


def loop_of(recipe: Recipe, **fields: Any) -> Loop:
    given = dict.fromkeys(("budget", "endpoints", "engines", "memory", "run_dir"))
    return Loop(
        **{
            **given,
            "recipe_source": "demo",
            "full_recipe": recipe,
            "started_at": now_utc(),
            "segment_mib": 1,
            **fields,
        }
    )


def test_before_a_plan_the_recipe_is_as_asked_and_after_it_as_chosen() -> None:
    loop = loop_of(load_recipe("demo"))
    assert loop.recipe is loop.full_recipe and loop.plan is None
    assert loop.full_recipe.pace is not None
    plan = make_plan(loop.full_recipe, loop.full_recipe.pace, PROBE, available_s=900)
    loop.plans.append(plan)
    assert loop.recipe.curation.num_conversations == plan.chosen.num_conversations < 900
    assert loop.recipe.gate == loop.full_recipe.gate


def test_time_counts_from_when_the_command_began() -> None:
    hour_ago = now_utc() - timedelta(hours=1)
    assert loop_of(load_recipe("demo")).left_s == pytest.approx(1150, abs=30)
    assert loop_of(load_recipe("demo"), begun_at=hour_ago).left_s == pytest.approx(
        1150 - 3600, abs=30
    )
    assert loop_of(load_recipe("qwen3-8b"), begun_at=hour_ago).left_s == float("inf")


def test_training_has_a_limit_by_pace_and_none_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "get_run_logger", lambda: logging.getLogger("pace"))
    loop = loop_of(load_recipe("demo"))
    assert training._within_pace(loop) == loop.full_recipe.training
    assert loop.full_recipe.pace is not None
    plan = make_plan(loop.full_recipe, loop.full_recipe.pace, PROBE, available_s=loop.left_s)
    loop.plans.append(plan)
    limit_s = training._within_pace(loop).max_trainer_s
    assert limit_s == pytest.approx(training_limit(plan, left_s=1150), abs=30)
