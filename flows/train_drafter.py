"""Train a drafter on hidden states streamed from the target while it trains."""

from __future__ import annotations

from prefect import flow

from components.contracts import CheckpointRef, DatasetRef
from components.training.job import TrainingResult
from tasks.loop import open_loop
from tasks.registry import finish_mlflow_run, start_mlflow_run
from tasks.targets import PUBLISHED, find_target
from tasks.training import require_same_target, train_on_stream


@flow(name="train-drafter", log_prints=True)
def train_drafter(
    recipe: str = "demo",
    budget: str | None = None,
    target: str = PUBLISHED,
    dataset: DatasetRef | None = None,
    parent: CheckpointRef | None = None,
) -> TrainingResult:
    """Extraction engine and trainer run side by side until the budget is spent.

    Args:
        recipe, budget, target: as in `curate_data`.
        dataset: None takes the latest one of this target.
        parent: drafter whose weights are the start; None starts as the recipe says.
    """
    with open_loop(recipe, budget=budget) as loop:
        found = find_target(loop, target)
        dataset = dataset or loop.recall("dataset", DatasetRef)
        require_same_target(dataset, found)
        run_id = start_mlflow_run(loop, found, dataset)
        with finish_mlflow_run(loop, run_id):
            return train_on_stream(loop, found, dataset, parent=parent, mlflow_run_id=run_id)
