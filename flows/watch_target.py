"""Look at the target; start the lifecycle when its content changed."""

from __future__ import annotations

from prefect import flow

from components.contracts import ChangeAction
from tasks.loop import open_loop
from tasks.registry import find_champion
from tasks.targets import PUBLISHED, classify_target_change, find_target
from tasks.watch import WatchOutcome, start_lifecycle


@flow(name="watch-target", log_prints=True)
def watch_target(recipe: str = "demo", budget: str | None = None) -> WatchOutcome:
    """Fingerprint the published target (weights, quantization, tokenizer, serving) and compare with
    the champion's.

    A changed fingerprint starts `drafter-lifecycle` once, however often the watch looks meanwhile.

    Args:
        recipe, budget: as in `curate_data`; the budget is handed to the lifecycle.
    """
    with open_loop(recipe, budget=budget) as loop:
        target = find_target(loop, PUBLISHED)
        change = classify_target_change(target, find_champion(loop))
        changed = change.action is not ChangeAction.NOTHING
        return WatchOutcome(
            change=change, lifecycle_run_id=start_lifecycle(loop, change) if changed else None
        )
