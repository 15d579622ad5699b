"""Look at the target; start the lifecycle when its content changed."""

from __future__ import annotations

from prefect import flow

from components.contracts import ChangeAction
from components.stages.targets import PUBLISHED, WatchOutcome
from flows.flow_run.run import run_of
from tasks.registry import find_champion
from tasks.targets import classify_target_change, find_target
from tasks.watch import start_lifecycle


@flow(name="watch-target", log_prints=True)
def watch_target(recipe: str = "demo", size: str | None = None) -> WatchOutcome:
    """Fingerprint the published target (weights, quantization, tokenizer, serving) and compare with
    the champion's.

    A changed fingerprint starts `drafter-lifecycle` once, however often the watch looks meanwhile.

    Args:
        recipe, size: as in `curate_data`; the size is handed to the lifecycle.
    """
    with run_of(recipe, size=size) as run:
        target = find_target(run, PUBLISHED)
        change = classify_target_change(run, target, find_champion(run))
        changed = change.action is not ChangeAction.NOTHING
        return WatchOutcome(
            change=change, lifecycle_run_id=start_lifecycle(run, change) if changed else None
        )
