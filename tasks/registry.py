"""MLflow as tasks. It restarts in seconds and every one of them is idempotent: they are retried."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from components.contracts import (
    AcceptanceReport,
    CanaryReport,
    CheckpointRef,
    DatasetRef,
    GateDecision,
    Release,
    TargetRef,
)
from components.stages import registry
from components.stages.run import Run
from tasks.retry import transient


@task(name="find champion", cache_policy=NO_CACHE, **transient(retries=3, delay_s=5))
def find_champion(run: Run) -> Release | None:
    """See `registry.find_champion`."""
    return registry.find_champion(run)


@task(name="find challenger", cache_policy=NO_CACHE, retries=0)
def find_release(run: Run, version: int | None, champion: Release | None) -> Release:
    """See `registry.find_release`."""
    return registry.find_release(run, version, champion)


@task(name="start MLflow run", cache_policy=NO_CACHE, **transient(retries=3, delay_s=5))
def start_mlflow_run(run: Run, target: TargetRef, dataset: DatasetRef) -> str:
    """See `registry.start_mlflow_run`."""
    return registry.start_mlflow_run(run, target, dataset)


@task(name="find MLflow run", cache_policy=NO_CACHE, **transient(retries=3, delay_s=5))
def mlflow_run_of(run: Run, target: TargetRef) -> str:
    """See `registry.mlflow_run_of`."""
    return registry.mlflow_run_of(run, target)


@task(name="register challenger", cache_policy=NO_CACHE, **transient(retries=3, delay_s=5))
def register_if_passed(
    run: Run,
    target: TargetRef,
    checkpoint: CheckpointRef,
    *,
    champion: CheckpointRef | None,
    report: AcceptanceReport,
    decision: GateDecision,
    mlflow_run_id: str,
) -> Release | None:
    """See `registry.register_if_passed`."""
    return registry.register_if_passed(
        run,
        target,
        checkpoint,
        champion=champion,
        report=report,
        decision=decision,
        mlflow_run_id=mlflow_run_id,
    )


@task(name="conclude canary", cache_policy=NO_CACHE, **transient(retries=3, delay_s=5))
def conclude_canary(
    run: Run, release: Release, champion: Release | None, canary: CanaryReport
) -> None:
    """See `registry.conclude_canary`."""
    registry.conclude_canary(run, release, champion, canary)
