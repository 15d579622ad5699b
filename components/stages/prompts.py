"""The prompts of a recipe: built-in slices, slices of one's own, template variants, languages.

A slice of one's own is read by the very readers of curation (`curation.sources`, `curation.rows`),
but whole: with the earlier answers of its row, its tool calls and its tools. Rows that cannot be
read are counted by reason and told of; too few that can be are an error.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

from components.curation.quarantine import BadRowError
from components.curation.sieve.language import UNKNOWN, language_of
from components.curation.sources.mixture import column_of, rows_in_order, source_state
from components.curation.sources.rows import read_context
from components.errors import CurationError, EvaluationError
from components.evaluation.prompts import (
    SLICES,
    Prompt,
    builtin_prompts,
    make_prompt,
    ordered,
    with_variants,
)
from components.settings import EvaluationSettings, Recipe, SliceSettings

REPEATED = "repeats another row"

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnSlice:
    """A slice of one's own as read.

    Attributes:
        prompts: every usable one, in the order of their content hash.
        num_rows: rows read.
        set_aside: rows that are no prompt, by reason.
    """

    prompts: tuple[Prompt, ...]
    num_rows: int
    set_aside: Mapping[str, int]


def load_prompts(
    settings: EvaluationSettings, *, template_variants: Sequence[Mapping[str, Any]] = ({},)
) -> tuple[Prompt, ...]:
    """All prompts of a recipe, ordered by hash (so any prefix mixes the slices).

    The same recipe and the same rows always give the same prompts, and a smaller number of a slice
    is a subset of a larger one. A file is read once, and again when it has changed.

    Args:
        settings: the recipe's section.
        template_variants: the recipe's `curation.template_variants`; each prompt of a slice gets
            one, by its hash and as many of each.

    Raises:
        EvaluationError: unknown slice, a source of one's own under a built-in name, a package,
            file or dataset that is missing, or fewer prompts than asked for.
    """
    chosen: list[Prompt] = []
    for name, one in settings.slices.items():
        if isinstance(one, SliceSettings):
            prompts: Sequence[Prompt] = _chosen(name, one)
        else:
            prompts = builtin_prompts(name, one)
        chosen += with_variants(prompts, template_variants)
    return tuple(
        replace(prompt, language=_language(prompt.user_text)) for prompt in ordered(chosen)
    )


def prompts_of(recipe: Recipe) -> tuple[Prompt, ...]:
    """All prompts of `recipe`, in its template variants; see `load_prompts`."""
    return load_prompts(recipe.evaluation, template_variants=recipe.curation.template_variants)


def held_out_texts(settings: EvaluationSettings) -> list[str]:
    """What must stay out of training: the user turns of the prompts, and of the other rows of a
    slice of one's own where its `keep_out` is 'all'.

    System messages are left out: a common one would take every conversation that opens with it.

    Raises:
        EvaluationError: as `load_prompts`.
    """
    return list(dict.fromkeys(_held_out_texts(settings)))


def rows_set_aside(settings: EvaluationSettings) -> dict[str, dict[str, int]]:
    """Rows of the slices of one's own that are no prompt: {slice: {reason: rows}}.

    Raises:
        EvaluationError: as `load_prompts`.
    """
    return {
        name: dict(read_slice(name, one).set_aside) for name, one in settings.own_slices.items()
    }


def read_slice(name: str, settings: SliceSettings) -> OwnSlice:
    """Every usable prompt of a slice of one's own.

    Raises:
        EvaluationError: its name is a built-in slice's, or its source cannot be opened.
    """
    if name in SLICES:
        raise EvaluationError(
            f"evaluation.slices.{name} is a built-in slice and cannot have a source of its own",
            fix="Give the slice another name.",
        )
    try:
        return _read(name, settings, source_state(settings.source(name)))
    except CurationError as error:
        got = error.problem if error.got is None else f"{error.problem}: {error.got}"
        raise EvaluationError(
            f"evaluation.slices.{name} cannot be read", got=got, expected=error.expected
        ) from error


@lru_cache(maxsize=32)
def _read(name: str, settings: SliceSettings, state: tuple[object, ...]) -> OwnSlice:  # noqa: ARG001
    """Read the rows; `state` is that of the files, so that changed ones are read again."""
    source = settings.source(name)
    found: dict[str, Prompt] = {}
    set_aside: Counter[str] = Counter()
    num_rows = 0

    for _, row in islice(rows_in_order(source), settings.max_rows):
        num_rows += 1
        try:
            prompt = _prompt(name, row, column=column_of(source))
        except BadRowError as reason:
            set_aside[str(reason)] += 1
            continue
        if prompt.prompt_id in found:
            set_aside[REPEATED] += 1
        found[prompt.prompt_id] = prompt

    if set_aside:
        _LOG.warning(
            "slice %s: %d of %d rows set aside: %s",
            name, set_aside.total(), num_rows, _counts(set_aside),
        )  # fmt: skip

    return OwnSlice(tuple(ordered(found.values())), num_rows, dict(set_aside))


def _prompt(name: str, row: object, *, column: str) -> Prompt:
    messages, tools = read_context(row, column=column)
    asked = [message.as_request() for message in messages]
    return make_prompt(name, asked, tools=json.loads(tools) if tools else ())


def _chosen(name: str, settings: SliceSettings) -> tuple[Prompt, ...]:
    read = read_slice(name, settings)
    if len(read.prompts) < settings.num_prompts:
        why = f"; set aside: {_counts(read.set_aside)}" if read.set_aside else ""
        raise EvaluationError(
            f"evaluation.slices.{name} cannot be met",
            got=f"{len(read.prompts)} usable prompts in {read.num_rows} rows{why}",
            expected=f"{settings.num_prompts} prompts",
            fix="Lower num_prompts, or add rows.",
        )
    return read.prompts[: settings.num_prompts]


def _held_out_texts(settings: EvaluationSettings) -> Iterator[str]:
    for name, one in settings.slices.items():
        if not isinstance(one, SliceSettings):
            prompts: Sequence[Prompt] = builtin_prompts(name, one)
        elif one.keep_out == "all":
            _chosen(name, one)  # one that cannot be measured is told of before anything is trained
            prompts = read_slice(name, one).prompts
        else:
            prompts = _chosen(name, one)
        for prompt in prompts:
            yield from (str(m["content"]) for m in prompt.messages if m["role"] == "user")


@lru_cache(maxsize=4096)
def _language(text: str) -> str | None:
    language = language_of(text)
    return None if language == UNKNOWN else language


def _counts(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
