"""The canary as tasks."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from components.contracts import CanaryReport, Release
from components.stages import canary as stage
from components.stages.run import Run


@task(name="canary", cache_policy=NO_CACHE, timeout_seconds=24 * 3600)
def roll_out(run: Run, release: Release, champion: Release | None) -> CanaryReport:
    """See `canary.roll_out`; never retried by itself."""
    return stage.roll_out(run, release, champion)


@task(name="keep serving", cache_policy=NO_CACHE)
def keep_serving(
    run: Run, release: Release, champion: Release | None, canary: CanaryReport
) -> None:
    """See `canary.keep_serving`."""
    stage.keep_serving(run, release, champion, canary)
