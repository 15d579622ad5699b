"""Curation, step by step: prompts, conversations, answers, the dataset."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager

from components.contracts import DatasetRef, TargetRef
from components.curation.answers.regenerate import Regeneration, regenerate
from components.curation.chunks import Apply
from components.curation.curate import Collected, Finished, collect, finish
from components.curation.sources.mixture import evaluation_texts
from components.curation.sources.self_prompts import with_written_prompts
from components.reporting.markdown_table import markdown_table
from components.settings import CurationSettings
from components.stages.engines import plain_engine
from components.stages.prompts import held_out_texts
from components.stages.run import Run

Applied = Callable[[CurationSettings], AbstractContextManager[Apply]]
"""Where the recipe wants its CPU-heavy steps done."""


def write_prompts(run: Run, target: TargetRef) -> CurationSettings:
    """Let the target write the prompts that the recipe wants of it; the settings of the steps that
    follow.
    """
    settings = run.recipe.curation
    engine = plain_engine(run, target)
    if not any(source.kind == "target" for source in settings.sources):
        return settings  # the engine starts while conversations are collected

    with run.stage("engine start"):
        engine.wait_ready(progress=run.reporter.progress("engine start"))
    with run.stage("write prompts"):
        return with_written_prompts(
            settings,
            engine_url=engine.url,
            model=target.name,
            target=target,
            folder=run.state_dir / "prompts",
            request_timeout_s=run.recipe.engine.request_timeout_s,
            progress=run.reporter.progress("write prompts"),
        )


def collect_conversations(
    run: Run, target: TargetRef, settings: CurationSettings, applied: Applied
) -> Collected:
    """Sources -> filters -> dedup -> decontamination against the held-out prompts."""
    with run.stage("collect"), applied(settings) as apply:
        return collect(
            settings,
            target=target,
            held_out=_held_out(run),
            spool_path=run.run_dir / "curation" / "collected.jsonl",
            progress=run.reporter.progress("collect"),
            apply=apply,
        )


# Answers are kept by content, so a retry pays only for what is missing.
def regenerate_answers(run: Run, target: TargetRef, collected: Collected) -> Regeneration:
    """The target itself answers every conversation, on vLLM."""
    engine = plain_engine(run, target)
    with run.stage("engine start"):
        engine.wait_ready(progress=run.reporter.progress("engine start"))

    with run.stage("regenerate") as clock:
        answers = regenerate(
            collected.conversations,
            engine_url=engine.url,
            model=target.name,
            settings=run.recipe.curation,
            request_timeout_s=run.recipe.engine.request_timeout_s,
            fingerprint=target.fingerprint,
            shard_dir=run.state_dir / "answers" / target.fingerprint.digest[:16],
            spool_path=run.run_dir / "curation" / "answered.jsonl",
            progress=run.reporter.progress("regenerate"),
        )
        clock.num_tokens = answers.num_tokens

    return answers


def render_and_validate(
    run: Run,
    target: TargetRef,
    settings: CurationSettings,
    collected: Collected,
    answers: Regeneration,
    applied: Applied,
) -> DatasetRef:
    """Chat template, loss mask, Great Expectations, Arrow dataset with its manifest."""
    with run.stage("validate") as clock, applied(settings) as apply:
        finished = finish(
            collected,
            answers,
            settings=settings,
            target=target,
            held_out=_held_out(run),
            max_model_len=run.recipe.engine.max_model_len,
            output_dir=run.state_dir / "datasets",
            progress=run.reporter.progress("validate"),
            apply=apply,
        )
        clock.num_tokens = sum(finished.dataset.num_tokens.values())

    shutil.rmtree(run.run_dir / "curation", ignore_errors=True)  # the rows are in the dataset now
    run.remember("dataset", finished.dataset)
    _publish(run, finished, collected, answers)
    return finished.dataset


def _held_out(run: Run) -> list[str]:
    """The prompts acceptance is measured on, and whatever other evaluation sets the recipe
    names.
    """
    own = held_out_texts(run.recipe.evaluation)
    return [*own, *evaluation_texts(run.recipe.curation.decontaminate_against)]


def _publish(run: Run, finished: Finished, collected: Collected, answers: Regeneration) -> None:
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
    run.reporter.markdown(
        "dataset",
        f"### Dataset `{dataset.digest[:12]}`\n\n{funnel}\n\n"
        f"{markdown_table(('source', 'left out because', 'conversations'), left_out)}\n\n"
        f"Tokens {sum(dataset.num_tokens.values()):,}, supervised "
        f"{sum(dataset.num_loss_tokens.values()):,}. "
        f"Data Docs: `{dataset.docs_path}`\n{warnings}",
        description="Curation funnel and size",
    )

    run.reporter.image("dataset-funnel", finished.funnel_plot, description="Curation funnel")
