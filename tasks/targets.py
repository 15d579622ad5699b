"""Find the target, take its fingerprint, say what changed."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from components.contracts import ChangeAction, Release, TargetChange, TargetRef
from components.errors import TargetError
from components.settings import Recipe
from components.targets.changes import classify_change
from components.targets.fingerprint import make_target_ref
from components.targets.publish import publish_target, read_published
from components.targets.resolve import resolve_target
from tasks.retry import is_transient
from tasks.artifacts import progress_reporter
from tasks.loop import Loop

PUBLISHED = "published"
SOURCE = "source"


def watched_path(recipe: Recipe, state_dir: Path) -> Path:
    """Where new versions of the target appear: the recipe's watch.path, else a place in the state folder."""
    return Path(recipe.watch.path) if recipe.watch.path else state_dir / "published" / recipe.target.name


@task(
    name="find target",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=10,
    retry_condition_fn=is_transient,
    timeout_seconds=3600,
)
def find_target(loop: Loop, which: str) -> TargetRef:
    """The target in use: 'published' (what the watch looks at, else the recipe's source), 'source', or a folder.

    Retried because a Hub download can be cut; resolving is cached by content, so a retry costs little.
    """
    settings, watched = loop.recipe.target, watched_path(loop.recipe, loop.state_dir)
    with loop.stage("find target"):
        if which not in (PUBLISHED, SOURCE):
            return make_target_ref(settings.name, Path(which), source=which, engine=loop.recipe.engine)
        if which == PUBLISHED and watched.exists():
            published = read_published(watched)
            return make_target_ref(settings.name, published, source=str(watched), engine=loop.recipe.engine)
        target = resolve_target(
            settings, cache_dir=loop.state_dir, engine=loop.recipe.engine, progress=progress_reporter("find target")
        )
        publish_target(Path(target.path), watched=watched)
        return target


@task(
    name="fingerprint published target",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=is_transient,
)
def fingerprint_published(recipe: Recipe, state_dir: Path) -> TargetRef:
    """Fingerprint what lies at the watched place now.

    Raises:
        TargetError: nothing was published there yet.
    """
    watched = watched_path(recipe, state_dir)
    if not watched.exists():
        raise TargetError(
            "nothing is published at the watched place yet",
            got=watched,
            fix=f"Run drafter-lifecycle/{recipe.name} once, or point watch.path of the recipe at the target's folder.",
        )
    return make_target_ref(recipe.target.name, read_published(watched), source=str(watched), engine=recipe.engine)


@task(name="classify change", cache_policy=NO_CACHE)
def classify_target_change(target: TargetRef, champion: Release | None) -> TargetChange:
    """What differs between the target the champion is bound to and the target found now."""
    change = classify_change(champion.target.fingerprint if champion else None, target.fingerprint)
    log = get_run_logger()
    if change.action is ChangeAction.NOTHING:
        log.info("target %s is the one the champion is bound to", target.name)
    else:
        log.info("target %s: %s -> %s (%s)", target.name, "+".join(change.kinds), change.action, change.reason)
    return change
