"""Real conversations in, a validated on-policy dataset out."""

from __future__ import annotations

from prefect import flow

from components.contracts import DatasetRef
from tasks.curation import (
    collect_conversations,
    regenerate_answers,
    render_and_validate,
    write_prompts,
)
from tasks.loop import open_loop
from tasks.pace import choose_amounts
from tasks.targets import PUBLISHED, find_target


@flow(name="curate-data", log_prints=True, validate_parameters=True)
def curate_data(
    recipe: str = "demo", budget: str | None = None, target: str = PUBLISHED
) -> DatasetRef:
    """Collect, let the target answer, render with its own template, validate.

    Args:
        recipe: name in `configs/` or path of a recipe.
        budget: overlay of the recipe, e.g. 'full'.
        target: 'published' (what the watch looks at), 'source' (the recipe's own), or a folder.
    """
    with open_loop(recipe, budget=budget) as loop:
        found = find_target(loop, target)
        choose_amounts(loop, found)
        settings = write_prompts(loop, found)
        collected = collect_conversations(loop, found, settings)
        answers = regenerate_answers(loop, found, collected)
        return render_and_validate(loop, found, settings, collected, answers)
