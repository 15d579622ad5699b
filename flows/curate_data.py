"""Real conversations in, a validated on-policy dataset out."""

from __future__ import annotations

from prefect import flow

from components.contracts import DatasetRef
from components.stages.targets import PUBLISHED
from flows.flow_run.run import run_of
from flows.flow_run.task_runner import applied
from tasks.curation import (
    choose_amounts,
    collect_conversations,
    regenerate_answers,
    render_and_validate,
    write_prompts,
)
from tasks.targets import find_target


@flow(name="curate-data", log_prints=True, validate_parameters=True)
def curate_data(
    recipe: str = "demo", size: str | None = None, target: str = PUBLISHED
) -> DatasetRef:
    """Collect, let the target answer, render with its own template, validate.

    Args:
        recipe: name in `configs/` or path of a recipe.
        size: overlay of the recipe, e.g. 'full'.
        target: 'published' (what the watch looks at), 'source' (the recipe's own), or a folder.
    """
    with run_of(recipe, size=size) as run:
        found = find_target(run, target)
        choose_amounts(run, found)
        settings = write_prompts(run, found)
        collected = collect_conversations(run, found, settings, applied)
        answers = regenerate_answers(run, found, collected)
        return render_and_validate(run, found, settings, collected, answers, applied)
