"""Finding the target, and what changed of it, as tasks."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from components.contracts import Release, TargetChange, TargetRef
from components.stages import targets
from components.stages.run import Run
from tasks.retry import transient


# A Hub download can be cut; resolving is cached by content, so a retry costs little.
@task(
    name="find target",
    cache_policy=NO_CACHE,
    timeout_seconds=6 * 3600,
    **transient(retries=2, delay_s=10),
)
def find_target(run: Run, which: str, *, publish: bool = True) -> TargetRef:
    """See `targets.find_target`."""
    return targets.find_target(run, which, publish=publish)


@task(name="classify change", cache_policy=NO_CACHE)
def classify_target_change(run: Run, target: TargetRef, champion: Release | None) -> TargetChange:
    """See `targets.classify_target_change`."""
    return targets.classify_target_change(run, target, champion)
