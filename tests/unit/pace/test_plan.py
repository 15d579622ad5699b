"""What a recipe does on machines of known pace: right amounts by hand, order of giving up,
minimums.
"""

from __future__ import annotations

import pytest

from components.contracts import Amounts, MachineProbe
from components.pace.model import EnginePace, stage_seconds, training_steps
from components.pace.plan import (
    full_amounts,
    least_amounts,
    make_plan,
    training_limit,
    with_amounts,
)
from components.settings import PaceSettings, Recipe, WarmPrefixSettings, load_recipe

FAST = MachineProbe(
    engine_up_s=14,
    tokens_per_s={4: 160, 64: 640},
    prompt_tokens_per_s=2800,
    training_step_s=0.2,
    trainer_up_s=10,
    duration_s=30,
)
"""Near the machine of the lab notes: 25 ms a step with 4 requests, 100 ms with 64."""


def slower(probe: MachineProbe, times: float) -> MachineProbe:
    return MachineProbe(
        engine_up_s=probe.engine_up_s * times,
        tokens_per_s={load: rate / times for load, rate in probe.tokens_per_s.items()},
        prompt_tokens_per_s=probe.prompt_tokens_per_s / times,
        training_step_s=probe.training_step_s * times,
        trainer_up_s=probe.trainer_up_s * times,
        duration_s=probe.duration_s * times,
    )


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("demo")


@pytest.fixture(scope="module")
def pace(recipe: Recipe) -> PaceSettings:
    assert recipe.pace is not None
    return recipe.pace


def test_two_loads_give_the_cost_of_a_step_and_of_a_row() -> None:
    # 4 / 160 = 25 ms and 64 / 640 = 100 ms: 75 ms for 60 rows, 20 ms for none.
    engine = EnginePace.fit({4: 160, 64: 640})
    assert engine.row_s == pytest.approx(0.00125)
    assert engine.base_s == pytest.approx(0.020)
    assert engine.tokens_per_s(4) == pytest.approx(160)
    assert engine.tokens_per_s(64) == pytest.approx(640)
    assert engine.tokens_per_s(1) == pytest.approx(1 / 0.02125)


def test_what_a_recipe_asks_of_the_gate_beside_is_counted(recipe: Recipe) -> None:
    amounts = Amounts(
        num_conversations=450,
        slices={"mt_bench": 10, "humaneval": 8},
        speed_requests_in_flight=(1,),
        num_untrained_prompts=0,
        canary_step_s=12,
    )

    def gate_s(**values: object) -> float:
        evaluation = recipe.evaluation.model_copy(update=values)
        return stage_seconds(recipe.model_copy(update={"evaluation": evaluation}), amounts, FAST)[
            "gate"
        ]

    plain_s = gate_s()
    speed_s = 2 * 8 * 4 * 64 * 0.02125
    assert gate_s(rivals=("ngram",)) - plain_s == pytest.approx(14 + speed_s + 18 * 64 / 160)
    assert gate_s(draft_lengths=(2, 3)) - plain_s == pytest.approx(
        2 * (14 + speed_s + 16 * 64 / 160)
    )
    assert gate_s(measure_schedule=True) - plain_s == pytest.approx(14 + speed_s)
    # One further temperature above 0: 16 prompts, and 2 arms x 4 prompts x 128 draws of 4 tokens.
    assert gate_s(temperatures=(0.0, 0.7)) - plain_s == pytest.approx(
        (16 * 64 + 2 * 4 * 128 * 4) / 160
    )
    warm = WarmPrefixSettings(num_questions=8, prefix_tokens=600)
    assert gate_s(warm_prefix=warm) - plain_s == pytest.approx(
        2 * (9 * 600 / 2800 + 16 * 64 * 0.02125)
    )


def test_one_load_is_taken_in_proportion() -> None:
    assert EnginePace.fit({8: 80}).tokens_per_s(2) == pytest.approx(80)


def test_rates_that_contradict_a_cost_per_row_are_not_extrapolated_below_zero() -> None:
    # A larger batch in less time is noise: a step takes as long at every load.
    engine = EnginePace.fit({4: 40, 64: 1280})
    assert engine.row_s == pytest.approx(0.0)
    assert engine.tokens_per_s(64) == pytest.approx(1280)


def test_stages_by_hand(recipe: Recipe) -> None:
    amounts = Amounts(
        num_conversations=450,
        slices={"mt_bench": 10, "humaneval": 8},
        speed_requests_in_flight=(1,),
        num_untrained_prompts=0,
        canary_step_s=12,
    )
    stages = stage_seconds(recipe, amounts, FAST)
    assert stages["write prompts"] == pytest.approx(1.7 * 0.4 * 450 * 50 / 640)
    assert stages["regenerate"] == pytest.approx(450 * 120 / 640)
    assert stages["collect and validate"] == pytest.approx(14 * 450 / 900)
    # 450 conversations, 95 % of them trained on, of 185 tokens, twice, in packs filled to 0.73 x
    # 384 tokens.
    steps = round(2 * 427.5 * 185 / (0.73 * 384))
    assert training_steps(recipe, amounts) == steps
    assert stages["train"] == pytest.approx(
        14 + 8192 / 2800 + 1.05 * steps * (0.2 + 0.73 * 384 / 2800)
    )
    # Two starts; 18 prompts four times and 16 twice at 4 in flight; 2 arms x 8 rounds x 4 requests,
    # and 19 kinds of request of 12 tokens, at 1 in flight.
    gate = 2 * 14 + (18 * 4 + 32) * 64 / 160 + (2 * 8 * 4 * 64 + 19 * 12) * 0.02125
    assert stages["gate"] == pytest.approx(gate)
    assert stages["canary"] == pytest.approx(14 + 5 * 12)
    assert stages["rest"] == pytest.approx(14)


def test_a_fast_machine_does_the_whole_recipe(recipe: Recipe, pace: PaceSettings) -> None:
    plan = make_plan(recipe, pace, FAST, available_s=1100)
    assert plan.chosen == plan.full == full_amounts(recipe)
    assert plan.fits and plan.expected_s <= 1100 and not plan.given_up
    assert with_amounts(recipe, plan.chosen) == recipe


def test_a_slower_machine_gives_up_conversations_first_and_ends_in_time(
    recipe: Recipe, pace: PaceSettings
) -> None:
    full_s = make_plan(recipe, pace, FAST, available_s=1e9).expected_s
    plan = make_plan(recipe, pace, FAST, available_s=full_s - 100)
    assert plan.fits and plan.expected_s <= full_s - 100
    assert pace.min_conversations <= plan.chosen.num_conversations < 900
    assert plan.chosen.model_copy(update={"num_conversations": 900}) == plan.full  # nothing else
    # One conversation more would not fit.
    more = plan.chosen.model_copy(update={"num_conversations": plan.chosen.num_conversations + 2})
    assert sum(stage_seconds(recipe, more, FAST).values()) > full_s - 100
    assert plan.given_up == (
        f"conversations, and training with them: {plan.chosen.num_conversations} of 900",
    )


def test_three_times_slower_ends_in_time_with_all_rules(recipe: Recipe, pace: PaceSettings) -> None:
    slow = slower(FAST, 3)
    full_s = make_plan(recipe, pace, slow, available_s=1e9).expected_s
    plan = make_plan(recipe, pace, slow, available_s=1150)
    assert full_s > 2 * 1150
    assert plan.fits and plan.expected_s <= 1150
    done = with_amounts(recipe, plan.chosen)
    assert done.gate == recipe.gate
    assert recipe.gate.serving_requests_in_flight in done.evaluation.speed_requests_in_flight
    assert all(number >= 8 for number in plan.chosen.slices.values())
    assert plan.chosen.num_conversations >= pace.min_conversations


def test_the_order_of_giving_up(recipe: Recipe, pace: PaceSettings) -> None:
    slow = slower(FAST, 3)
    seen = []
    for available_s in range(2700, 500, -10):
        plan = make_plan(recipe, pace, slow, available_s=float(available_s))
        for words in plan.given_up:
            kind = words.split(":")[0].split(",")[0].split(" at ")[0]
            if kind not in seen:
                seen.append(kind)
    assert seen == [
        "conversations",
        "speed",
        "the untrained drafter beside the trained one",
        "evaluation prompts",
        "length of a canary step",
    ]


def test_the_largest_slices_come_down_first_and_small_ones_never(
    recipe: Recipe, pace: PaceSettings
) -> None:
    least = least_amounts(recipe, pace)
    assert least.slices == {"mt_bench": 8, "humaneval": 8, "gsm_symbolic": 8, "conversations": 8}
    sizes = {"slices": {"mt_bench": 4, "humaneval": 20}}
    small = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update=sizes)})
    assert least_amounts(small, pace).slices == {"mt_bench": 4, "humaneval": 8}


def test_where_not_even_the_least_fits_it_is_done_and_said(
    recipe: Recipe, pace: PaceSettings
) -> None:
    plan = make_plan(recipe, pace, slower(FAST, 10), available_s=300)
    assert not plan.fits
    assert plan.chosen == least_amounts(recipe, pace)
    assert plan.expected_s > 300


def test_training_ends_so_that_what_follows_fits(recipe: Recipe, pace: PaceSettings) -> None:
    plan = make_plan(recipe, pace, FAST, available_s=1100)
    after_s = plan.stages["gate"] + plan.stages["canary"] + plan.stages["rest"]
    assert training_limit(plan, left_s=900) == pytest.approx(900 - after_s)
    # A run that is late trains for six tenths of what was planned rather than not at all.
    assert training_limit(plan, left_s=0) == pytest.approx(0.6 * plan.stages["train"])


def test_only_amounts_change_and_own_slices_stay(recipe: Recipe, pace: PaceSettings) -> None:
    least = least_amounts(recipe, pace)
    done = with_amounts(recipe, least)
    assert done.curation.num_conversations == 200
    assert done.canary.step_s == pace.min_canary_step_s
    assert done.evaluation.max_tokens == recipe.evaluation.max_tokens
    untouched = ("target", "engine", "stream", "drafter", "training", "gate", "watch", "pace")
    assert all(getattr(done, name) == getattr(recipe, name) for name in untouched)


@pytest.mark.parametrize(
    ("name", "size"), [("qwen3-8b", None), ("demo", "full"), ("demo", "test"), ("demo", "change")]
)
def test_other_recipes_and_budgets_have_no_pace(name: str, size: str | None) -> None:
    assert load_recipe(name, size=size).pace is None


def test_the_demo_hides_no_seconds_of_training() -> None:
    assert load_recipe("demo").training.max_trainer_s is None
