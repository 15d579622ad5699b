"""Training as a task."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from components.contracts import CheckpointRef, DatasetRef, TargetRef
from components.stages import training
from components.stages.run import Run
from components.training.job import TrainingResult


# Not retried: a run that fails here trains anew when its flow is run again.
@task(
    name="train on streamed hidden states",
    cache_policy=NO_CACHE,
    timeout_seconds=training.TRAINER_TIMEOUT_S,
)
def train_on_stream(
    run: Run,
    target: TargetRef,
    dataset: DatasetRef,
    *,
    parent: CheckpointRef | None,
    mlflow_run_id: str,
) -> TrainingResult:
    """See `training.train_on_stream`."""
    return training.train_on_stream(
        run, target, dataset, parent=parent, mlflow_run_id=mlflow_run_id
    )


@task(name="check dataset", cache_policy=NO_CACHE)
def require_same_target(dataset: DatasetRef, target: TargetRef) -> None:
    """See `training.require_same_target`."""
    training.require_same_target(dataset, target)
