"""The recipe that a report was measured by, where the recipe lets the machine's pace choose
amounts.
"""

from __future__ import annotations

from collections import Counter

from components.contracts import AcceptanceReport, Arm
from components.pace.plan import full_amounts, least_amounts, with_amounts
from components.settings import Recipe


def as_paced(recipe: Recipe, report: AcceptanceReport) -> Recipe:
    """`recipe` with the prompts per slice and the loads that `report` holds, within what its pace
    may give up.

    Nothing is less than the pace's minimum or more than the recipe's own amount, so a report with
    fewer prompts is still told to lack them. A recipe without a pace stays as it is.
    """
    if recipe.pace is None:
        return recipe
    full = full_amounts(recipe)
    least = least_amounts(recipe, recipe.pace)
    candidate = report.arms.get(Arm.CANDIDATE)
    names = [prompt.prompt_id for prompt in candidate.prompts] if candidate is not None else []
    counts = Counter(name.rsplit("/", 1)[0] for name in {*names, *report.excluded})

    loads = (
        {point.requests_in_flight for point in candidate.speed} if candidate is not None else set()
    )
    return with_amounts(
        recipe,
        full.model_copy(
            update={
                "slices": {
                    name: min(number, max(least.slices[name], counts[name]))
                    for name, number in full.slices.items()
                },
                "speed_requests_in_flight": tuple(
                    level
                    for level in full.speed_requests_in_flight
                    if level in loads or level in least.speed_requests_in_flight
                ),
            }
        ),
    )
