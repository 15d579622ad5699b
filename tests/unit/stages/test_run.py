"""What the flows of one run share of its pace: the recipe as chosen, the time that is left, the
limit on training.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from components.contracts import MachineProbe, now_utc
from components.pace.plan import make_plan, training_limit
from components.settings import Recipe, load_recipe
from components.stages import training
from components.stages.run import Run
from tests.support.reporters import KeepingReporter

PROBE = MachineProbe(
    engine_up_s=30,
    tokens_per_s={4: 80, 64: 320},
    prompt_tokens_per_s=1400,
    training_step_s=0.4,
    trainer_up_s=20,
    duration_s=40,
)


def run_of(recipe: Recipe, **fields: Any) -> Run:
    given = dict.fromkeys(("size", "endpoints", "engines", "memory", "run_dir"))
    return Run(
        **{
            **given,
            "recipe_source": "demo",
            "full_recipe": recipe,
            "started_at": now_utc(),
            "segment_mib": 1,
            "reporter": KeepingReporter(),
            **fields,
        }
    )


def test_before_a_plan_the_recipe_is_as_asked_and_after_it_as_chosen() -> None:
    run = run_of(load_recipe("demo"))
    assert run.recipe is run.full_recipe and run.plan is None
    assert run.full_recipe.pace is not None
    plan = make_plan(run.full_recipe, run.full_recipe.pace, PROBE, available_s=900)
    run.plans.append(plan)
    assert run.recipe.curation.num_conversations == plan.chosen.num_conversations < 900
    assert run.recipe.gate == run.full_recipe.gate


def test_time_counts_from_when_the_command_began() -> None:
    hour_ago = now_utc() - timedelta(hours=1)
    assert run_of(load_recipe("demo")).left_s == pytest.approx(1150, abs=30)
    assert run_of(load_recipe("demo"), begun_at=hour_ago).left_s == pytest.approx(
        1150 - 3600, abs=30
    )
    assert run_of(load_recipe("qwen3-8b"), begun_at=hour_ago).left_s == float("inf")


def test_training_has_a_limit_by_pace_and_none_without() -> None:
    run = run_of(load_recipe("demo"))
    assert training._within_pace(run) == run.full_recipe.training
    assert run.full_recipe.pace is not None
    plan = make_plan(run.full_recipe, run.full_recipe.pace, PROBE, available_s=run.left_s)
    run.plans.append(plan)
    limit_s = training._within_pace(run).max_trainer_s
    assert limit_s == pytest.approx(training_limit(plan, left_s=1150), abs=30)
