"""What a recipe asks of a report beside the rules of its gate, and the rules that the report
answers it. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from components.contracts import (
    AcceptanceReport,
    Arm,
    ArmReport,
    RuleResult,
    SampledOutputs,
    Verdict,
)
from components.evaluation.prompts import Prompt, prompt_digest
from components.evaluation.report import arm_report
from components.settings import Recipe

MAX_TOLD = 6
"""Differences named in a rule's words."""


@dataclass(frozen=True)
class Asked:
    """What a report must hold to be decided by.

    Attributes:
        recipe: with its overlay.
        size: name of the overlay.
        prompts: of all slices of the recipe.
        champion_digest: of the drafter in service that the candidate must have been measured
            against; None: there is none, or it has the candidate's weights.
    """

    recipe: Recipe
    size: str | None
    prompts: tuple[Prompt, ...]
    champion_digest: str | None = None


def expected_loads(recipe: Recipe, *, num_draft_tokens: int) -> tuple[int, ...]:
    """Requests in flight at which no draft answers again: as acceptance is measured, and with as
    many rows in a step.

    Verification of K drafts puts K + 1 rows a request into a step; kernels round by the number of
    rows. Empty at a temperature: sampled outputs say nothing about rounding.
    """
    if recipe.evaluation.temperature > 0:
        return ()
    load = recipe.evaluation.acceptance_requests_in_flight
    rows = min(load * (num_draft_tokens + 1), max(load, recipe.engine.max_num_seqs))
    return tuple(dict.fromkeys((load, rows)))


def as_asked(report: AcceptanceReport, asked: Asked) -> RuleResult:
    """The report holds what the recipe asks for: its prompts, temperatures, arms and comparisons.

    What is missing is no evidence against the drafter and none for it: inconclusive.
    """
    differences = list(_differences(report, asked))
    told = "; ".join(differences[:MAX_TOLD])
    more = f"; and {len(differences) - MAX_TOLD} more" if len(differences) > MAX_TOLD else ""
    return RuleResult(
        rule="measured as the recipe asks",
        verdict=Verdict.INCONCLUSIVE if differences else Verdict.PASS,
        value=len(differences),
        threshold=0,
        detail=told + more
        if differences
        else "prompts, temperatures, arms and comparisons are the recipe's",
    )


def _differences(report: AcceptanceReport, asked: Asked) -> Iterator[str]:
    evaluation = asked.recipe.evaluation
    for what, got, wanted in (
        ("recipe", report.recipe, asked.recipe.name),
        ("size", report.size, asked.size),
        ("dtype", report.dtype, asked.recipe.engine.dtype),
        ("temperature", report.temperature, evaluation.temperature),
        ("answers' length", report.max_tokens, evaluation.max_tokens),
    ):
        if got != wanted:
            yield f"{what} {got} for {wanted}"

    yield from _prompt_differences(report, asked)
    yield from _arm_differences(report, asked)
    yield from _comparison_differences(report, asked)


def _prompt_differences(report: AcceptanceReport, asked: Asked) -> Iterator[str]:
    """Prompts of the candidate, and of no draft and champion with it: each that was asked for,
    once.
    """
    if report.prompt_digest != prompt_digest(asked.prompts):
        yield "other prompts than the recipe's"
    wanted = {prompt.prompt_id: prompt.slice for prompt in asked.prompts}
    limit = asked.recipe.evaluation.max_excluded_share * len(wanted)
    excluded = set(report.excluded)

    if len(excluded) > limit or not excluded <= set(wanted):
        yield (
            f"{len(excluded)} prompts left out, at most {math.floor(limit)} of the recipe's may be"
        )

    for name in (Arm.CANDIDATE, Arm.NO_DRAFT, *([Arm.CHAMPION] if asked.champion_digest else [])):
        arm = report.arms.get(name)
        if arm is None:
            continue
        got = {prompt.prompt_id: prompt.slice for prompt in arm.prompts}
        missing = wanted.keys() - excluded - got.keys()
        strange = got.items() - wanted.items()
        if missing or strange:
            slices = Counter(got.values())
            asked_for = asked.recipe.evaluation.slices
            yield (
                f"{name} answered {len(got)} prompts of slices {dict(sorted(slices.items()))},"
                f" {len(missing)} of the recipe's are missing and {len(strange)} are not its own"
                f" ({len(asked_for)} slices, {len(wanted)} prompts)"
            )


def _arm_differences(report: AcceptanceReport, asked: Asked) -> Iterator[str]:
    """What the recipe asks for beside the candidate's prompts and the report lacks, a sentence
    each: in one place, so that nothing that is asked for goes unchecked.
    """
    evaluation = asked.recipe.evaluation
    if Arm.NO_DRAFT not in report.arms:
        yield "no plain engine beside the candidate"

    champion = report.arms.get(Arm.CHAMPION)
    if asked.champion_digest and (
        champion is None or champion.checkpoint_digest != asked.champion_digest
    ):
        yield f"the champion in service ({asked.champion_digest[:12]}) was not measured"

    further = {one.temperature: one.arms for one in report.further_temperatures}
    if set(further) != set(evaluation.temperatures[1:]):
        yield f"further temperatures {sorted(further)} for {sorted(evaluation.temperatures[1:])}"

    for temperature, arms in further.items():
        needed = min(evaluation.num_sampled_prompts, len(asked.prompts))
        for name in (Arm.CANDIDATE, *([Arm.CHAMPION] if asked.champion_digest else [])):
            got = len(arms[name].prompts) if name in arms else 0
            if got < needed - len(report.excluded):
                yield (
                    f"{name} answered {got} prompts at temperature {temperature:g}, {needed} "
                    "are asked for"
                )

    missing = set(evaluation.rivals) - {one.rival.method for one in report.rivals}
    if missing:
        yield f"rivals not measured: {', '.join(sorted(missing))}"

    for name in (Arm.CANDIDATE, Arm.NO_DRAFT):
        loads = (
            {point.requests_in_flight for point in report.arms[name].speed}
            if name in report.arms
            else set()
        )
        if name in report.arms and not set(evaluation.speed_requests_in_flight) <= loads:
            yield (
                f"speed of {name} at {sorted(loads)} in flight for "
                f"{sorted(evaluation.speed_requests_in_flight)}"
            )


def _comparison_differences(report: AcceptanceReport, asked: Asked) -> Iterator[str]:
    """No draft against itself at the loads that are compared, and draws at each temperature above
    0.
    """
    candidate, plain = report.arms.get(Arm.CANDIDATE), report.arms.get(Arm.NO_DRAFT)
    if candidate is None or plain is None:
        return

    wanted = expected_loads(asked.recipe, num_draft_tokens=len(candidate.acceptance_by_position))
    complete = {
        one.num_in_flight
        for one in report.self_comparisons
        if one.num_compared == len(plain.prompts)
    }

    if not set(wanted) <= complete:
        yield (
            f"the plain engine against itself at {sorted(complete)} in flight for {sorted(wanted)}"
        )

    drawn = {one.temperature for one in report.sampled_outputs if _is_drawn(one, asked)}
    missing = {
        temperature for temperature in asked.recipe.evaluation.temperatures if temperature > 0
    } - drawn

    if missing:
        yield (
            "no draws with and without the drafter at temperature "
            f"{', '.join(f'{t:g}' for t in sorted(missing))}"
        )


def _is_drawn(sampled: SampledOutputs, asked: Asked) -> bool:
    evaluation = asked.recipe.evaluation
    is_paired = sampled.plain.keys() == sampled.drafted.keys()
    draws = [len(one) for one in (*sampled.plain.values(), *sampled.drafted.values())]
    num_prompts = min(evaluation.num_draw_prompts, len(asked.prompts))
    return (
        is_paired
        and len(sampled.plain) >= num_prompts
        and min(draws, default=0) >= evaluation.num_draws
    )


def figures_hold(report: AcceptanceReport) -> RuleResult:
    """Every figure of every arm is what its prompts give: none was written beside them."""
    wrong = [f"{name}.{figure}" for name, arm in _arms(report) for figure in _wrong_figures(arm)]
    return RuleResult(
        rule="figures follow from the prompts",
        verdict=Verdict.FAIL if wrong else Verdict.PASS,
        value=len(wrong),
        threshold=0,
        detail=f"not what the prompts give: {', '.join(wrong[:MAX_TOLD])}"
        if wrong
        else "lengths, coverage, positions and histograms are",
    )


def _arms(report: AcceptanceReport) -> list[tuple[str, ArmReport]]:
    arms = [(name, arm) for name, arm in report.arms.items() if arm.prompts]
    for further in report.further_temperatures:
        arms += [(f"{name} at {further.temperature:g}", arm) for name, arm in further.arms.items()]
    return arms + [(f"{one.num_draft_tokens} drafts", one.arm) for one in report.draft_lengths]


def _wrong_figures(arm: ArmReport) -> list[str]:
    again = arm_report(
        arm.arm,
        prompts=arm.prompts,
        speed=arm.speed,
        checkpoint_digest=arm.checkpoint_digest,
        num_draft_tokens=len(arm.acceptance_by_position),
        engine_counters=arm.engine_counters,
    )

    names = (
        "acceptance_length",
        "draft_coverage",
        "acceptance_by_slice",
        "acceptance_by_position",
        "acceptance_histogram",
    )

    return [name for name in names if not _same(getattr(arm, name), getattr(again, name))]


def _same(told: object, found: object) -> bool:
    if isinstance(told, float) and isinstance(found, float):
        return math.isclose(told, found, rel_tol=1e-6, abs_tol=1e-9) or (
            math.isnan(told) and math.isnan(found)
        )
    if isinstance(told, dict) and isinstance(found, dict):
        return told.keys() == found.keys() and all(_same(told[key], found[key]) for key in told)
    if isinstance(told, tuple) and isinstance(found, tuple):
        return len(told) == len(found) and all(
            _same(a, b) for a, b in zip(told, found, strict=True)
        )
    return told == found
