"""The whole loop: from the target as it is now to a drafter that serves it, or to the decision not
to.
"""

from __future__ import annotations

from datetime import datetime

from prefect import flow

from components.contracts import ChangeAction, CheckpointRef
from components.reporting.report import LifecycleReport
from components.stages.lifecycle import Story
from components.stages.targets import PUBLISHED
from flows.curate_data import curate_data
from flows.deploy_canary import deploy_canary
from flows.flow_run.run import run_of
from flows.gate_drafter import gate_drafter
from flows.train_drafter import train_drafter
from tasks.gate import measure_champion
from tasks.lifecycle import decide_action, rebind_champion, write_lifecycle_report
from tasks.registry import find_champion
from tasks.targets import classify_target_change, find_target


@flow(name="drafter-lifecycle", log_prints=True)
def drafter_lifecycle(
    recipe: str = "demo",
    size: str | None = None,
    target: str = PUBLISHED,
    begun_at: datetime | None = None,
) -> LifecycleReport:
    """Find the target; re-bind the champion if it still holds on it, else curate and train; gate;
    canary; report.

    Args:
        recipe: name in `configs/` or path of a recipe.
        size: overlay of the recipe, e.g. 'full'.
        target: 'published' (what the watch looks at), 'source' (the recipe's own), or a folder.
        begun_at: when the command began that this run is part of: a recipe's `pace.ends_within_s`
            counts from there; None: from this run's own start.
    """
    with run_of(recipe, size=size, begun_at=begun_at) as run:
        found = find_target(run, target)
        champion = find_champion(run)
        story = Story(found, champion, classify_target_change(run, found, champion))
        candidate: CheckpointRef | None = None

        if champion is not None and story.change.action is ChangeAction.REMEASURE:
            measured = measure_champion(run, found, champion.checkpoint)
            story.policy = decide_action(run, story.change, champion, measured)
            if story.policy.action is ChangeAction.REBIND:
                candidate = rebind_champion(run, found, champion)

        if candidate is None:
            story.dataset = curate_data(recipe, size, found.path)
            # A changed target: start warm.
            parent = champion.checkpoint if champion and story.policy else None
            story.training = train_drafter(recipe, size, found.path, story.dataset, parent)
            candidate = story.training.checkpoint

        untrained = (
            story.training.untrained
            if story.training and not story.training.checkpoint.parent_digest
            else None
        )
        story.gate = gate_drafter(recipe, size, found.path, candidate, untrained)
        release = story.gate.release
        if release is not None:
            story.canary = deploy_canary(recipe, size, release.version)

        return write_lifecycle_report(run, story)
