"""Curation steps as tasks."""

from __future__ import annotations

import shutil

from prefect import task
from prefect.cache_policies import NO_CACHE

from components.contracts import DatasetRef, TargetRef
from components.curation.answers.regenerate import Regeneration, regenerate
from components.curation.curate import Collected, Finished, collect, finish
from components.curation.sources.mixture import evaluation_texts
from components.curation.sources.self_prompts import with_written_prompts
from components.settings import CurationSettings
from components.stages.engines import plain_engine
from components.stages.prompts import held_out_texts
from tasks.artifacts import markdown_table, progress_reporter, publish_image, publish_markdown
from tasks.chunks import applied
from tasks.loop import Loop
from tasks.retry import is_transient


@task(
    name="write prompts",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=is_transient,
)
def write_prompts(loop: Loop, target: TargetRef) -> CurationSettings:
    """Let the target write the prompts that the recipe wants of it; the settings of the steps that
    follow.
    """
    settings = loop.recipe.curation
    engine = plain_engine(loop, target)
    if not any(source.kind == "target" for source in settings.sources):
        return settings  # the engine starts while conversations are collected
    with loop.stage("engine start"):
        engine.wait_ready()
    with loop.stage("write prompts"):
        return with_written_prompts(
            settings,
            engine_url=engine.url,
            model=target.name,
            target=target,
            folder=loop.state_dir / "prompts",
            progress=progress_reporter("write prompts"),
        )


@task(
    name="collect conversations",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=10,
    retry_condition_fn=is_transient,
)
def collect_conversations(loop: Loop, target: TargetRef, settings: CurationSettings) -> Collected:
    """Sources -> filters -> dedup -> decontamination against the held-out prompts."""
    with loop.stage("collect"), applied(settings) as apply:
        return collect(
            settings,
            target=target,
            held_out=_held_out(loop),
            spool_path=loop.run_dir / "curation" / "collected.jsonl",
            progress=progress_reporter("collect"),
            apply=apply,
        )


# Answers are kept by content, so a retry pays only for what is missing.
@task(
    name="regenerate answers",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=is_transient,
    timeout_seconds=7 * 24 * 3600,
)
def regenerate_answers(loop: Loop, target: TargetRef, collected: Collected) -> Regeneration:
    """The target itself answers every conversation, on vLLM."""
    engine = plain_engine(loop, target)
    with loop.stage("engine start"):
        engine.wait_ready()
    with loop.stage("regenerate") as clock:
        answers = regenerate(
            collected.conversations,
            engine_url=engine.url,
            model=target.name,
            settings=loop.recipe.curation,
            fingerprint=target.fingerprint,
            shard_dir=loop.state_dir / "answers" / target.fingerprint.digest[:16],
            spool_path=loop.run_dir / "curation" / "answered.jsonl",
            progress=progress_reporter("regenerate"),
        )
        clock.num_tokens = answers.num_tokens
    return answers


@task(name="render and validate", cache_policy=NO_CACHE)
def render_and_validate(
    loop: Loop,
    target: TargetRef,
    settings: CurationSettings,
    collected: Collected,
    answers: Regeneration,
) -> DatasetRef:
    """Chat template, loss mask, Great Expectations, Arrow dataset with its manifest."""
    with loop.stage("validate") as clock, applied(settings) as apply:
        finished = finish(
            collected,
            answers,
            settings=settings,
            target=target,
            held_out=_held_out(loop),
            max_model_len=loop.recipe.engine.max_model_len,
            output_dir=loop.state_dir / "datasets",
            progress=progress_reporter("validate"),
            apply=apply,
        )
        clock.num_tokens = sum(finished.dataset.num_tokens.values())
    shutil.rmtree(loop.run_dir / "curation", ignore_errors=True)  # the rows are in the dataset now
    loop.remember("dataset", finished.dataset)
    _publish(finished, collected, answers)
    return finished.dataset


def _held_out(loop: Loop) -> list[str]:
    """The prompts acceptance is measured on, and whatever other evaluation sets the recipe
    names.
    """
    own = held_out_texts(loop.recipe.evaluation)
    return [*own, *evaluation_texts(loop.recipe.curation.decontaminate_against)]


def _publish(finished: Finished, collected: Collected, answers: Regeneration) -> None:
    dataset = finished.dataset
    funnel = markdown_table(
        ("step", "conversations"), [(step, f"{n:,}") for step, n in dataset.funnel.items()]
    )
    left_out = [
        (source, reason, f"{count:,}")
        for quarantine in (collected.quarantine, collected.refused, answers.quarantine)
        for source, reasons in quarantine.by_source().items()
        for reason, count in reasons.items()
    ]
    warnings = "".join(f"\n- warning: {finding}" for finding in finished.warnings)
    publish_markdown(
        "dataset",
        f"### Dataset `{dataset.digest[:12]}`\n\n{funnel}\n\n"
        f"{markdown_table(('source', 'left out because', 'conversations'), left_out)}\n\n"
        f"Tokens {sum(dataset.num_tokens.values()):,}, supervised "
        f"{sum(dataset.num_loss_tokens.values()):,}. "
        f"Data Docs: `{dataset.docs_path}`\n{warnings}",
        description="Curation funnel and size",
    )
    publish_image("dataset-funnel", finished.funnel_plot, description="Curation funnel")
