"""A rollout's outputs, judged by the rule that the release passed its gate with."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from components.contracts import PlainAnswers, Release, Slot
from components.evaluation.outputs.watch import OutputWatch
from components.evaluation.prompts import Prompt
from components.registry.client import Registry
from components.registry.releases import acceptance_report_of, download_extra
from components.serving.rollout.rollout import CheckOutputs
from components.serving.rollout.traffic import RequestRecord
from components.settings import Recipe
from components.stages.gate.conduct import PLAIN_ANSWERS
from components.stages.prompts import prompts_of


def replayed_prompts(registry: Registry, release: Release, recipe: Recipe) -> list[Prompt]:
    """The gate's prompts that a rollout replays: its figures are what the judge expects. Those that
    it left out as too long would only be refused again.

    Raises:
        RegistryError: the gate's report is missing or damaged.
    """
    left_out = acceptance_report_of(registry, release).excluded
    return [prompt for prompt in prompts_of(recipe) if prompt.prompt_id not in left_out]


def output_check(
    registry: Registry, release: Release, recipe: Recipe, prompts: Sequence[Prompt]
) -> CheckOutputs:
    """Says of replayed requests why the candidate's greedy outputs are not the target's own; None
    where they are.

    Over the whole rollout, a lossless engine is called lossy with the chance
    `gate.losslessness_alpha` of the recipe.

    Args:
        registry: that holds the release's evidence.
        release: which is rolled out.
        recipe: that it is rolled out by.
        prompts: as replayed, in that order.

    Raises:
        RegistryError: the evidence is missing or damaged.
        EvaluationError: the plain engine's answers are not those of the report.
    """
    with tempfile.TemporaryDirectory() as folder:
        plain = PlainAnswers.read(download_extra(registry, release, PLAIN_ANSWERS, Path(folder)))
    watch = OutputWatch(
        acceptance_report_of(registry, release), plain, alpha=recipe.gate.losslessness_alpha
    )

    def check(records: Sequence[RequestRecord]) -> str | None:
        for record in records:
            if record.ok and record.slot is Slot.CANDIDATE:
                watch.add(
                    prompts[record.prompt].prompt_id, record.token_ids, was_cut=record.was_cut
                )
        return watch.fault()

    return check
