"""The gate as tasks: each of its steps is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE

from components.contracts import AcceptanceReport, CheckpointRef, GateDecision, TargetRef
from components.evaluation.acceptance import Measured
from components.stages.gate import in_run
from components.stages.run import Run
from tasks.retry import transient

ResultT = TypeVar("ResultT")


def as_task(name: str, work: Callable[[], ResultT], /) -> ResultT:
    """Do `work` as a Prefect task of this name, tried once more after what a restart of a service
    can cure.
    """
    # Measurements go on where they were: what was counted is in a journal.
    return task(name=name, cache_policy=NO_CACHE, **transient(retries=1, delay_s=5))(work)()


@task(name="remeasure champion", cache_policy=NO_CACHE)
def measure_champion(run: Run, target: TargetRef, champion: CheckpointRef) -> Measured:
    """See `in_run.measure_champion`."""
    return in_run.measure_champion(run, target, champion)


@task(name="decide", cache_policy=NO_CACHE)
def decide_on(
    run: Run, report: AcceptanceReport, candidate: CheckpointRef, champion: CheckpointRef | None
) -> GateDecision:
    """See `in_run.decide_on`."""
    return in_run.decide_on(run, report, candidate, champion)
