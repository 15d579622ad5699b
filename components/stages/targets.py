"""Find the target, take its fingerprint, say what changed."""

from __future__ import annotations

from pathlib import Path

from components.contracts import ChangeAction, Record, Release, TargetChange, TargetRef
from components.settings import Recipe
from components.stages.run import Run
from components.targets.changes import classify_change
from components.targets.fingerprint import make_target_ref
from components.targets.publish import publish_target, read_published
from components.targets.resolve import resolve_target

PUBLISHED = "published"
SOURCE = "source"


class WatchOutcome(Record):
    """What the watch saw, and the lifecycle run that takes care of it, if any."""

    change: TargetChange
    lifecycle_run_id: str | None


def watched_path(recipe: Recipe, state_dir: Path) -> Path | None:
    """Where new versions of the target appear.

    The recipe's watch.path if it has one. A Hub id or a local folder is watched itself (None). A
    package's file never changes, so a link in the state folder stands for the target in production.
    """
    if recipe.watch.path:
        return Path(recipe.watch.path).expanduser()
    return (
        state_dir / "published" / recipe.target.name if recipe.target.source == "package" else None
    )


def find_target(run: Run, which: str, *, publish: bool = True) -> TargetRef:
    """The target in use: 'published' (what the watch looks at), 'source' (the recipe's own), or a
    folder.

    A package's target is published when it is resolved, so that the watch has something to look at.
    """
    recipe = run.recipe
    watched = watched_path(run.recipe, run.state_dir)
    # A lifecycle names the target to its subflows by its folder: fingerprinted already.
    if which not in (PUBLISHED, SOURCE):
        return _reference(run, Path(which), source=which)

    with run.stage("find target"):
        if which == PUBLISHED and watched is not None and watched.exists():
            return _reference(run, read_published(watched), source=f"published at {watched.name}")
        target = resolve_target(
            recipe.target,
            cache_dir=run.state_dir,
            engine=recipe.engine,
            progress=run.reporter.progress("find target"),
        )
        # A place that the user named is the user's to write.
        if publish and watched is not None and not recipe.watch.path:
            publish_target(Path(target.path), watched=watched)
        return target


def classify_target_change(run: Run, target: TargetRef, champion: Release | None) -> TargetChange:
    """What differs between the target the champion is bound to and the target found now."""
    change = classify_change(champion.target.fingerprint if champion else None, target.fingerprint)
    if change.action is ChangeAction.NOTHING:
        run.reporter.info("target %s is the one the champion is bound to", target.name)
    else:
        kinds = "+".join(change.kinds) or "first release"
        run.reporter.info(
            "target %s: %s -> %s (%s)", target.name, kinds, change.action, change.reason
        )
    return change


def _reference(run: Run, path: Path, *, source: str) -> TargetRef:
    return make_target_ref(
        run.recipe.target.name,
        path=path,
        source=source,
        engine=run.recipe.engine,
        cache_dir=run.state_dir,
    )
