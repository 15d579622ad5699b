"""How much of a recipe fits into the time that is left. Pure.

What is given up, and in which order, is written in `PaceSettings`. Each lever is pulled all the way
before the next one is touched, and only as far as needed where it goes in steps; what a coarse one
leaves over goes back to conversations and training.
"""

from __future__ import annotations

from collections.abc import Callable

from components.contracts import Amounts, MachineProbe, PacePlan
from components.pace.model import stage_seconds, training_steps
from components.settings import PaceSettings, Recipe

MIN_TRAINING_SHARE = 0.6
"""Of the expected training time: what a run that is late leaves to training all the same."""


def full_amounts(recipe: Recipe) -> Amounts:
    """The recipe's own amounts."""
    evaluation = recipe.evaluation
    return Amounts(
        num_conversations=recipe.curation.num_conversations,
        slices={
            name: number for name, number in evaluation.slices.items() if isinstance(number, int)
        },
        speed_requests_in_flight=evaluation.speed_requests_in_flight,
        num_untrained_prompts=evaluation.num_untrained_prompts,
        canary_step_s=recipe.canary.step_s,
    )


def least_amounts(recipe: Recipe, pace: PaceSettings) -> Amounts:
    """What the recipe's pace may go down to: a check of a gate's report asks for no less."""
    full = full_amounts(recipe)
    return Amounts(
        num_conversations=min(full.num_conversations, pace.min_conversations),
        slices={
            name: min(number, pace.min_prompts_per_slice) for name, number in full.slices.items()
        },
        speed_requests_in_flight=_serving_only(recipe, full.speed_requests_in_flight),
        num_untrained_prompts=0,
        canary_step_s=min(full.canary_step_s, pace.min_canary_step_s),
    )


def with_amounts(recipe: Recipe, amounts: Amounts) -> Recipe:
    """The recipe with those amounts in place of its own; whatever else it says stays."""
    evaluation = recipe.evaluation
    changes = {
        "curation": {"num_conversations": amounts.num_conversations},
        "evaluation": {
            "slices": {**evaluation.slices, **amounts.slices},
            "speed_requests_in_flight": amounts.speed_requests_in_flight,
            "num_untrained_prompts": amounts.num_untrained_prompts,
        },
        "canary": {"step_s": amounts.canary_step_s},
    }

    sections = {
        name: getattr(recipe, name).model_copy(update=values) for name, values in changes.items()
    }
    return recipe.model_copy(update=sections)


def make_plan(
    recipe: Recipe, pace: PaceSettings, probe: MachineProbe, *, available_s: float
) -> PacePlan:
    """The most of the recipe that is expected to end in `available_s` from now; its minimum where
    that does not.

    Args:
        recipe: with its own amounts.
        pace: what may be given up.
        probe: of this machine.
        available_s: seconds from now to when the report should be there.
    """
    full = full_amounts(recipe)
    least = least_amounts(recipe, pace)

    def seconds(amounts: Amounts) -> float:
        return sum(stage_seconds(recipe, amounts, probe).values())

    chosen = full
    for lever in _LEVERS:
        if seconds(chosen) <= available_s:
            break
        chosen = lever(chosen, least, lambda amounts: seconds(amounts) <= available_s)
    chosen = _conversations_back(chosen, full, lambda amounts: seconds(amounts) <= available_s)
    return PacePlan(
        probe=probe,
        full=full,
        chosen=chosen,
        available_s=available_s,
        full_s=seconds(full),
        stages=stage_seconds(recipe, chosen, probe),
        training_steps=training_steps(recipe, chosen),
        given_up=_given_up(full, chosen),
        fits=seconds(chosen) <= available_s,
    )


def training_limit(plan: PacePlan, *, left_s: float) -> float:
    """Seconds after which training ends in any case, set when it begins.

    What is left less what is still to come after training; never under `MIN_TRAINING_SHARE` of the
    time that training was expected to take, so that a run that is late trains a little less rather
    than not at all.

    Args:
        plan: of this run.
        left_s: seconds from now to when the report should be there.
    """
    after_s = sum(plan.stages[name] for name in ("gate", "canary", "rest"))
    return max(left_s - after_s, MIN_TRAINING_SHARE * plan.stages["train"])


Fits = Callable[[Amounts], bool]


def _fewer_conversations(chosen: Amounts, least: Amounts, fits: Fits) -> Amounts:
    return _with_conversations(
        chosen,
        _most(
            least.num_conversations,
            chosen.num_conversations,
            lambda n: fits(_with_conversations(chosen, n)),
        ),
    )


def _serving_speed_only(chosen: Amounts, least: Amounts, _fits: Fits) -> Amounts:
    return chosen.model_copy(update={"speed_requests_in_flight": least.speed_requests_in_flight})


def _no_untrained(chosen: Amounts, least: Amounts, _fits: Fits) -> Amounts:
    return chosen.model_copy(update={"num_untrained_prompts": least.num_untrained_prompts})


def _fewer_prompts(chosen: Amounts, least: Amounts, fits: Fits) -> Amounts:
    """The largest slices come down first, level with the next ones."""

    def at_most(number: int) -> Amounts:
        slices = {
            name: max(least.slices[name], min(have, number)) for name, have in chosen.slices.items()
        }
        return chosen.model_copy(update={"slices": slices})

    if not chosen.slices:
        return chosen
    low, high = min(least.slices.values()), max(chosen.slices.values())
    return at_most(_most(low, high, lambda number: fits(at_most(number))))


def _shorter_canary(chosen: Amounts, least: Amounts, _fits: Fits) -> Amounts:
    return chosen.model_copy(update={"canary_step_s": least.canary_step_s})


_LEVERS: tuple[Callable[[Amounts, Amounts, Fits], Amounts], ...] = (
    _fewer_conversations, _serving_speed_only, _no_untrained, _fewer_prompts, _shorter_canary,
)  # fmt: skip


def _conversations_back(chosen: Amounts, full: Amounts, fits: Fits) -> Amounts:
    number = _most(
        chosen.num_conversations,
        full.num_conversations,
        lambda n: fits(_with_conversations(chosen, n)),
    )
    return _with_conversations(chosen, number)


def _with_conversations(amounts: Amounts, number: int) -> Amounts:
    return amounts.model_copy(update={"num_conversations": number})


def _most(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number in low..high that fits, by bisection; `low` where none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _serving_only(recipe: Recipe, levels: tuple[int, ...]) -> tuple[int, ...]:
    level = recipe.gate.serving_requests_in_flight
    return (level,) if level in levels else levels[:1]


def _given_up(full: Amounts, chosen: Amounts) -> tuple[str, ...]:
    """What is less than in the recipe, in words, in the order in which it is given up."""
    told = []
    if chosen.num_conversations < full.num_conversations:
        told.append(
            f"conversations, and training with them: {chosen.num_conversations} of "
            f"{full.num_conversations}"
        )

    if chosen.speed_requests_in_flight != full.speed_requests_in_flight:
        levels = [
            f"{level}"
            for level in full.speed_requests_in_flight
            if level not in chosen.speed_requests_in_flight
        ]
        told.append(f"speed at {', '.join(levels)} in flight")

    if chosen.num_untrained_prompts < full.num_untrained_prompts:
        told.append("the untrained drafter beside the trained one")
    if chosen.slices != full.slices:
        told.append(
            f"evaluation prompts: {sum(chosen.slices.values())} of {sum(full.slices.values())}"
        )

    if chosen.canary_step_s < full.canary_step_s:
        told.append(
            f"length of a canary step: {chosen.canary_step_s:g} of {full.canary_step_s:g} s"
        )
    return tuple(told)
