"""Train a drafter on hidden states streamed from the target while it trains."""

from __future__ import annotations

from prefect import flow

from components.contracts import CheckpointRef, DatasetRef
from components.stages.registry import finish_mlflow_run
from components.stages.targets import PUBLISHED
from components.training.job import TrainingResult
from flows.flow_run.run import run_of
from tasks.registry import start_mlflow_run
from tasks.targets import find_target
from tasks.training import require_same_target, train_on_stream


@flow(name="train-drafter", log_prints=True)
def train_drafter(
    recipe: str = "demo",
    size: str | None = None,
    target: str = PUBLISHED,
    dataset: DatasetRef | None = None,
    parent: CheckpointRef | None = None,
) -> TrainingResult:
    """Extraction engine and trainer run side by side until the recipe's steps or time are spent.

    Args:
        recipe, size, target: as in `curate_data`.
        dataset: None takes the latest one of this target.
        parent: drafter whose weights are the start; None starts as the recipe says.
    """
    with run_of(recipe, size=size) as run:
        found = find_target(run, target)
        dataset = dataset or run.recall("dataset", DatasetRef)
        require_same_target(dataset, found)
        run_id = start_mlflow_run(run, found, dataset)
        with finish_mlflow_run(run, run_id):
            return train_on_stream(run, found, dataset, parent=parent, mlflow_run_id=run_id)
