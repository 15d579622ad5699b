"""The steps of curation, composed so that a task is one call each: `collect` -> `regenerate` ->
`finish`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.contracts import DatasetRef, Progress, TargetRef
from components.curation.answers.regenerate import Regeneration
from components.curation.answers.spool import conversation_spool
from components.curation.chunks import CHUNK, Apply, apply_here, round_size
from components.curation.conversation import AnsweredConversation, Conversation, Row
from components.curation.dataset.expectations import (
    Finding,
    ScalarFrame,
    Validation,
    validate_frame,
)
from components.curation.dataset.plots import plot_funnel
from components.curation.dataset.render import (
    Renderer,
    load_renderer,
    prove_masks,
    rewrites_history,
)
from components.curation.dataset.row_spool import RowSpool
from components.curation.dataset.split import TRAIN, VALIDATION, check_both_splits, split_of
from components.curation.dataset.write import DOCS_INDEX, staging_dir, write_dataset
from components.curation.funnel import Funnel
from components.curation.quarantine import Quarantine
from components.curation.sieve.decontaminate import HeldOut
from components.curation.sieve.dedup import cross_similarity
from components.curation.sieve.language import language_of
from components.curation.sieve.sieve import BATCH, PromptJudge, Sieve, renderer_here
from components.curation.sources.mixture import Mixture, describe_source
from components.curation.text import batches
from components.errors import CurationError, DatasetValidationError
from components.settings import CurationSettings
from components.system.revision import code_revision

if TYPE_CHECKING:
    import pandas as pd

REPORT_INTERVAL_S = 4.0
NUM_PROVEN_ROWS = 200
"""Rows whose masked spans are decoded and compared with their answers; all of a small dataset."""


@dataclass(frozen=True)
class Collected:
    """Prompts that survived every filter, in the order drawn, with what was left out and why."""

    conversations: Sequence[Conversation]
    funnel: dict[str, int]
    quarantine: Quarantine = field(default_factory=Quarantine)
    """Rows that could not be read."""
    refused: Quarantine = field(default_factory=Quarantine)
    """Conversations that filters, duplicate searches and decontamination removed."""
    num_by_source: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished:
    """The dataset, and what a reader of the run should see of its making."""

    dataset: DatasetRef
    funnel_plot: Path
    warnings: tuple[Finding, ...]


def collect(
    settings: CurationSettings,
    *,
    target: TargetRef,
    held_out: Sequence[str] = (),
    spool_path: Path,
    progress: Progress,
    apply: Apply = apply_here,
) -> Collected:
    """Draw from the sources until `num_conversations` prompts passed every filter, or the sources
    are dry.

    Args:
        settings: the recipe's section.
        target: its tokenizer counts prompt tokens.
        held_out: texts of the evaluation prompts; whatever repeats 13 words of one is left out.
        spool_path: file for the survivors, so that memory does not grow with them; overwritten.
        progress: called at least every 5 s, between the chunks.
        apply: where the filters run.

    Raises:
        CurationError: a source cannot be opened, the target has no chat template, or too few
            prompts survive for a training and a validation split.
    """
    load_renderer(target)  # a target without a template is told of here, not in some worker
    judged = PromptJudge(settings, target.path, target.name)
    quarantine, refused = Quarantine(), Quarantine()
    mixture = Mixture(settings, quarantine=quarantine)
    sieve = Sieve(settings, HeldOut(held_out), refused)
    kept = conversation_spool(spool_path)
    splits: set[str] = set()

    reported = time.monotonic()
    num_unused = 0
    for batch in batches(mixture, round_size(settings.num_conversations, least=BATCH)):
        reasons = [*chain.from_iterable(apply(judged, batches(batch, CHUNK)))]
        verdicts = sieve.sift(batch, reasons, at_most=settings.num_conversations - len(kept))
        for conversation, is_kept in zip(batch, verdicts, strict=False):
            if is_kept:
                kept.append(conversation)
                splits.add(split_of(conversation.id, validation_share=settings.validation_share))
        num_unused = len(batch) - len(verdicts)
        for index, conversation in enumerate(batch):
            if index >= len(verdicts) or not verdicts[index]:
                mixture.refuse(conversation.source)
        if time.monotonic() - reported >= REPORT_INTERVAL_S:
            progress(f"{mixture.num_read} rows read", len(kept), settings.num_conversations)
            reported = time.monotonic()
        if len(kept) >= settings.num_conversations:
            break

    progress("done", len(kept), settings.num_conversations)
    check_both_splits(splits, num_conversations=len(kept))
    num_read = mixture.num_read - num_unused  # the last batch may hold more than was needed
    read = {
        "read": num_read,
        "well_formed": num_read - quarantine.total,
        "not_held_out": num_read - quarantine.total - mixture.num_held_out,
    }

    funnel = Funnel({**read, **sieve.funnel.as_dict()})
    kept.flush()
    return Collected(kept, funnel.as_dict(), quarantine, refused, mixture.num_accepted)


@dataclass(frozen=True)
class RowRenderer:
    """Rendering and telling the language, as work that can be done in any process."""

    target_path: str
    target_name: str

    def __call__(
        self, answered: Sequence[AnsweredConversation]
    ) -> tuple[Sequence[AnsweredConversation], list[Row]]:
        """The conversations, and their rows."""
        renderer = renderer_here(self.target_path, self.target_name)
        rows = (row for batch in batches(answered, BATCH) for row in renderer.render_all(batch))
        return answered, [
            _with_language(row, item) for row, item in zip(rows, answered, strict=True)
        ]


def _with_language(row: Row, item: AnsweredConversation) -> Row:
    return replace(row, origin=replace(row.origin, language=language_of(item.conversation.text)))


def finish(
    collected: Collected,
    regeneration: Regeneration,
    *,
    settings: CurationSettings,
    target: TargetRef,
    held_out: Sequence[str] = (),
    max_model_len: int,
    output_dir: Path,
    progress: Progress,
    apply: Apply = apply_here,
) -> Finished:
    """Render, split, validate and write: everything after the answers.

    Args:
        collected: of `collect`; its funnel goes on here.
        regeneration: of `regenerate`, for `collected.conversations`.
        settings: the recipe's section; it is copied into the manifest.
        target: whose template renders the rows and whose fingerprint binds them.
        held_out: the texts given to `collect`; validation checks again that none is repeated.
        max_model_len: longest row in tokens that the engines take.
        output_dir: parent folder of all datasets.
        progress: called between the steps, and between the chunks of rendering.
        apply: where rendering runs.

    Raises:
        CurationError: rendering cannot be trusted (template missing or altered, a mask that does
            not read as its answers), or one of the splits is empty.
        DatasetValidationError: a critical expectation failed. No dataset is written; the Data Docs
            are kept.
    """
    renderer = load_renderer(target)
    with staging_dir(Path(output_dir)) as staging:
        rows, frame = _render(
            regeneration.answered,
            renderer,
            HeldOut(held_out),
            staging,
            work=RowRenderer(target.path, target.name),
            settings=settings,
            progress=progress,
            apply=apply,
        )
        num_rows = sum(rows.counts().values())
        progress("validate", 0, num_rows)
        similarity = _similarity_across(
            regeneration.answered, frame.splits, settings.near_duplicate_threshold
        )
        validation = _validate(
            frame.frame(similarity), staging, Path(output_dir), settings, renderer, max_model_len
        )
        funnel = Funnel(
            {**collected.funnel, "answered": len(regeneration.answered), "rendered": num_rows}
        ).as_dict()
        plot_funnel(funnel, staging / "funnel.png")
        _write_examples(collected, regeneration, staging)
        dataset = write_dataset(
            rows,
            output_dir=Path(output_dir),
            fingerprint=target.fingerprint,
            funnel=funnel,
            manifest=_manifest(collected, regeneration, settings, renderer, validation.warnings),
            staging=staging,
        )

    progress("dataset written", num_rows, num_rows)
    return Finished(dataset, Path(dataset.path) / "funnel.png", validation.warnings)


def _validate(
    frame: pd.DataFrame,
    staging: Path,
    output_dir: Path,
    settings: CurationSettings,
    renderer: Renderer,
    max_model_len: int,
) -> Validation:
    docs_dir = staging / Path(DOCS_INDEX).parent
    try:
        return validate_frame(
            frame,
            docs_dir=docs_dir,
            settings=settings,
            vocab_size=renderer.vocab_size,
            max_tokens=max_model_len,
        )
    except DatasetValidationError as error:
        # The staging folder goes; what explains the refusal must not.
        kept = (
            output_dir
            / "failed"
            / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{staging.name[-8:]}"
        )
        kept.parent.mkdir(parents=True, exist_ok=True)
        docs_dir.rename(kept)
        raise DatasetValidationError(
            error.problem, got=error.got, fix=f"See the Data Docs: {kept / 'index.html'}"
        ) from None


def _write_examples(collected: Collected, regeneration: Regeneration, folder: Path) -> None:
    collected.quarantine.write(folder / "quarantine.jsonl")
    collected.refused.write(folder / "refused.jsonl")
    regeneration.quarantine.write(folder / "unanswered.jsonl")


def _render(
    answered: Sequence[AnsweredConversation],
    renderer: Renderer,
    held_out: HeldOut,
    folder: Path,
    *,
    work: RowRenderer,
    settings: CurationSettings,
    progress: Progress,
    apply: Apply,
) -> tuple[RowSpool, ScalarFrame]:
    """Rows on disk and their scalars; the masks of the first ones are proven."""
    if not answered:
        raise CurationError("there are no answered conversations to render")
    spool = RowSpool(folder)
    frame = ScalarFrame()
    num_done = 0
    reported = time.monotonic()

    for batch, rows in apply(work, batches(answered, CHUNK)):
        if num_done < NUM_PROVEN_ROWS:
            prove_masks(rows[:NUM_PROVEN_ROWS], batch[:NUM_PROVEN_ROWS], renderer)
        for item, row in zip(batch, rows, strict=True):
            split = split_of(row.conversation_id, validation_share=settings.validation_share)
            spool.add(row, split)
            frame.add(row, split, contaminated=held_out.contaminates(item.conversation))
        num_done += len(batch)
        if time.monotonic() - reported >= REPORT_INTERVAL_S:
            progress("render", num_done, len(answered))
            reported = time.monotonic()

    check_both_splits(set(frame.splits), num_conversations=num_done)
    return spool, frame


def _similarity_across(
    answered: Sequence[AnsweredConversation], splits: Sequence[str], threshold: float
) -> dict[str, float]:
    def prompts(split: str) -> Iterator[Conversation]:
        return (
            item.conversation
            for item, where in zip(answered, splits, strict=True)
            if where == split
        )

    return cross_similarity(prompts(VALIDATION), prompts(TRAIN), threshold=threshold)


def _manifest(
    collected: Collected,
    regeneration: Regeneration,
    settings: CurationSettings,
    renderer: Renderer,
    findings: Sequence[Finding],
) -> dict[str, Any]:
    """Everything a reader may ask about the rows that the digest does not cover."""
    return {
        "recipe": settings.model_dump(mode="json"),
        "sources": [describe_source(source) for source in settings.sources],
        "num_by_source": collected.num_by_source,
        "quarantined": collected.quarantine.by_source(),
        "refused": collected.refused.by_source(),
        "unanswered": regeneration.quarantine.by_source(),
        "exact_tokens": regeneration.exact_tokens,
        "template_rewrites_history": rewrites_history(renderer),
        "template_injects_date": renderer.injects_date,
        "warnings": [f"{finding.expectation}: {finding.observed}" for finding in findings],
        "engine_version": regeneration.engine_version,
        "code_revision": code_revision(),
    }
