"""Find the target, take its fingerprint, say what changed."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from components.contracts import ChangeAction, Release, TargetChange, TargetRef
from components.settings import Recipe
from components.targets.changes import classify_change
from components.targets.fingerprint import make_target_ref
from components.targets.publish import publish_target, read_published
from components.targets.resolve import resolve_target
from tasks.artifacts import progress_reporter
from tasks.loop import Loop
from tasks.retry import is_transient

PUBLISHED = "published"
SOURCE = "source"


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


# Retried because a Hub download can be cut; resolving is cached by content, so a retry costs
# little.
@task(
    name="find target",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=10,
    retry_condition_fn=is_transient,
    timeout_seconds=6 * 3600,
)
def find_target(loop: Loop, which: str, *, publish: bool = True) -> TargetRef:
    """The target in use: 'published' (what the watch looks at), 'source' (the recipe's own), or a
    folder.

    A package's target is published when it is resolved, so that the watch has something to look at.
    """
    recipe, watched = loop.recipe, watched_path(loop.recipe, loop.state_dir)
    if which not in (
        PUBLISHED,
        SOURCE,
    ):  # how the lifecycle names the target to its subflows: already fingerprinted
        return _reference(loop, Path(which), source=which)
    with loop.stage("find target"):
        if which == PUBLISHED and watched is not None and watched.exists():
            return _reference(loop, read_published(watched), source=f"published at {watched.name}")
        target = resolve_target(
            recipe.target,
            cache_dir=loop.state_dir,
            engine=recipe.engine,
            progress=progress_reporter("find target"),
        )
        if (
            publish and watched is not None and not recipe.watch.path
        ):  # a place the user named is the user's to write
            publish_target(Path(target.path), watched=watched)
        return target


@task(name="classify change", cache_policy=NO_CACHE)
def classify_target_change(target: TargetRef, champion: Release | None) -> TargetChange:
    """What differs between the target the champion is bound to and the target found now."""
    change = classify_change(champion.target.fingerprint if champion else None, target.fingerprint)
    log = get_run_logger()
    if change.action is ChangeAction.NOTHING:
        log.info("target %s is the one the champion is bound to", target.name)
    else:
        kinds = "+".join(change.kinds) or "first release"
        log.info("target %s: %s -> %s (%s)", target.name, kinds, change.action, change.reason)
    return change


def _reference(loop: Loop, path: Path, *, source: str) -> TargetRef:
    return make_target_ref(
        loop.recipe.target.name,
        path=path,
        source=source,
        engine=loop.recipe.engine,
        cache_dir=loop.state_dir,
    )
