"""Two real changes of a target as tasks, and waiting for what the loop makes of each."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from uuid import UUID

from prefect import get_client, task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from components.contracts import TargetRef
from components.errors import ServiceError
from components.reporting.report import LifecycleReport, TargetChangeReport
from components.stages import target_change
from components.stages.run import Run
from components.stages.targets import WatchOutcome

LIFECYCLE_TIMEOUT_S = 3600.0
POLL_S = 2.0
LOG_EVERY_S = 10.0


@task(name="quantize target to INT8 W8A8", cache_policy=NO_CACHE)
def quantize(run: Run, target: TargetRef) -> Path:
    """See `target_change.quantize`."""
    return target_change.quantize(run, target)


@task(name="fine-tune target", cache_policy=NO_CACHE)
def finetune(run: Run, target: TargetRef) -> Path:
    """See `target_change.finetune`."""
    return target_change.finetune(run, target)


@task(name="publish target", cache_policy=NO_CACHE)
def publish(run: Run, path: Path) -> datetime:
    """See `target_change.publish`."""
    return target_change.publish(run, path)


@task(name="wait for lifecycle", cache_policy=NO_CACHE)
def wait_for_run(run_id: str | None, *, timeout_s: float) -> None:
    """Wait until a flow run of another process ends well; a line at least every 10 s.

    Raises:
        ServiceError: it failed, was cancelled, or takes too long.
    """
    if run_id is None:
        raise ServiceError(
            "the watch saw no change, so no lifecycle runs",
            fix="Was the same target published twice?",
        )
    started_s = time.monotonic()
    logged_s = float("-inf")
    with get_client(sync_client=True) as client:
        while True:
            run = client.read_flow_run(UUID(run_id))
            state = run.state
            if state is not None and state.is_final():
                break

            waited_s = time.monotonic() - started_s
            if waited_s > timeout_s:
                raise ServiceError(
                    f"lifecycle run {run.name} takes too long", expected=f"{timeout_s:g} s at most"
                )
            if time.monotonic() - logged_s >= LOG_EVERY_S:
                shown = state.name if state else "unknown"
                get_run_logger().info("lifecycle run %s: %s, %.0f s", run.name, shown, waited_s)
                logged_s = time.monotonic()
            time.sleep(POLL_S)
    if not state.is_completed():
        raise ServiceError(f"lifecycle run {run.name} ended as {state.name}", got=state.message)


@task(name="report change", cache_policy=NO_CACHE)
def change_report(
    run: Run, name: str, seen: WatchOutcome, published_at: datetime
) -> TargetChangeReport:
    """See `target_change.change_report`."""
    return target_change.change_report(run, name, seen, published_at)


@task(name="report", cache_policy=NO_CACHE)
def second_act_report(
    run: Run, source: TargetRef, changes: list[TargetChangeReport]
) -> LifecycleReport:
    """See `target_change.second_act_report`."""
    return target_change.second_act_report(run, source, changes)
