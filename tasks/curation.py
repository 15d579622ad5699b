"""Curation as tasks. Answers are kept by content, so a retry pays only for what is missing."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from components.contracts import DatasetRef, PacePlan, TargetRef
from components.curation.answers.regenerate import Regeneration
from components.curation.curate import Collected
from components.settings import CurationSettings
from components.stages import curation, pace
from components.stages.curation import Applied
from components.stages.run import Run
from tasks.retry import transient


@task(name="choose amounts", cache_policy=NO_CACHE)
def choose_amounts(run: Run, target: TargetRef) -> PacePlan | None:
    """See `pace.choose_amounts`."""
    return pace.choose_amounts(run, target)


@task(name="write prompts", cache_policy=NO_CACHE, **transient(retries=2, delay_s=5))
def write_prompts(run: Run, target: TargetRef) -> CurationSettings:
    """See `curation.write_prompts`."""
    return curation.write_prompts(run, target)


@task(name="collect conversations", cache_policy=NO_CACHE, **transient(retries=2, delay_s=10))
def collect_conversations(
    run: Run, target: TargetRef, settings: CurationSettings, applied: Applied
) -> Collected:
    """See `curation.collect_conversations`."""
    return curation.collect_conversations(run, target, settings, applied)


@task(
    name="regenerate answers",
    cache_policy=NO_CACHE,
    timeout_seconds=7 * 24 * 3600,
    **transient(retries=2, delay_s=5),
)
def regenerate_answers(run: Run, target: TargetRef, collected: Collected) -> Regeneration:
    """See `curation.regenerate_answers`."""
    return curation.regenerate_answers(run, target, collected)


@task(name="render and validate", cache_policy=NO_CACHE)
def render_and_validate(
    run: Run,
    target: TargetRef,
    settings: CurationSettings,
    collected: Collected,
    answers: Regeneration,
    applied: Applied,
) -> DatasetRef:
    """See `curation.render_and_validate`."""
    return curation.render_and_validate(run, target, settings, collected, answers, applied)
