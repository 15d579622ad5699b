"""What only the whole loop does, as tasks: decide, re-bind, report."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from components.contracts import CheckpointRef, Release, TargetChange, TargetRef
from components.evaluation.acceptance import Measured
from components.reporting.report import LifecycleReport
from components.stages import lifecycle
from components.stages.lifecycle import Story
from components.stages.run import Run
from components.targets.changes import MeasuredPolicy


@task(name="decide after measurement", cache_policy=NO_CACHE)
def decide_action(
    run: Run, change: TargetChange, champion: Release, measured: Measured
) -> MeasuredPolicy:
    """See `lifecycle.decide_action`."""
    return lifecycle.decide_action(run, change, champion, measured)


@task(name="re-bind champion", cache_policy=NO_CACHE)
def rebind_champion(run: Run, target: TargetRef, champion: Release) -> CheckpointRef:
    """See `lifecycle.rebind_champion`."""
    return lifecycle.rebind_champion(run, target, champion)


@task(name="report", cache_policy=NO_CACHE)
def write_lifecycle_report(run: Run, story: Story) -> LifecycleReport:
    """See `lifecycle.write_lifecycle_report`."""
    return lifecycle.write_lifecycle_report(run, story)
