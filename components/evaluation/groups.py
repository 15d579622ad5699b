"""Acceptance length of an arm by length of the prompt and by language of the user's text. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from components.contracts import ArmGroups, ArmReport, GroupAcceptance, PromptMeasurement
from components.evaluation.rules.estimated import acceptance_sums, slices_of
from components.evaluation.statistics.ratios import Interval, estimate_ratio, ratio_of_sums

BAND_ENDS = (64, 256, 1024, 4096)
"""Prompt tokens, inclusive, at which a band of lengths ends; the last band has no end."""

NOT_TOLD = "not told"
"""Language of texts that are too short to tell, and of measurements that did not look."""


def length_band(prompt: PromptMeasurement) -> str:
    """Band of a prompt's length in tokens, its chat template included: '65 to 256'."""
    index = bisect_left(BAND_ENDS, prompt.num_prompt_tokens)
    if index == 0:
        return f"up to {BAND_ENDS[0]:,}"
    if index == len(BAND_ENDS):
        return f"more than {BAND_ENDS[-1]:,}"
    return f"{BAND_ENDS[index - 1] + 1:,} to {BAND_ENDS[index]:,}"


def language_of_prompt(prompt: PromptMeasurement) -> str:
    """ISO 639-1 code, or `NOT_TOLD`."""
    return prompt.language or NOT_TOLD


def acceptance_by_group(
    prompts: Sequence[PromptMeasurement], key: Callable[[PromptMeasurement], str]
) -> tuple[GroupAcceptance, ...]:
    """Acceptance length of each group of prompts, with its interval; the largest group first.

    A ratio of sums over the prompts of the group, (accepted + steps) / steps, its 95 % interval as
    for a slice (`statistics`), with the slices as strata. Few prompts that differ have an interval
    beyond what K draft tokens can give: it ends at K + 1.

    Args:
        prompts: of one arm. Those without a speculative step do not count.
        key: names the group of a prompt.
    """
    groups: dict[str, list[PromptMeasurement]] = {}
    for prompt in prompts:
        if prompt.num_steps:
            groups.setdefault(key(prompt), []).append(prompt)

    return tuple(
        GroupAcceptance(
            group=name,
            num_prompts=len(members),
            acceptance_length=ratio_of_sums(*acceptance_sums(members)),
            interval=_interval(members),
        )
        for name, members in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    )


def acceptance_groups(arms: Iterable[ArmReport]) -> tuple[ArmGroups, ...]:
    """Every drafting arm by length, shortest band first, and by language, most prompts first."""
    return tuple(
        ArmGroups(
            arm=arm.arm,
            by_length=_by_length(arm.prompts),
            by_language=acceptance_by_group(arm.prompts, language_of_prompt),
        )
        for arm in arms
        if any(prompt.num_steps for prompt in arm.prompts)
    )


def _by_length(prompts: Sequence[PromptMeasurement]) -> tuple[GroupAcceptance, ...]:
    shortest: dict[str, int] = {}
    for prompt in prompts:
        band = length_band(prompt)
        shortest[band] = min(prompt.num_prompt_tokens, shortest.get(band, prompt.num_prompt_tokens))
    groups = acceptance_by_group(prompts, length_band)
    return tuple(sorted(groups, key=lambda group: shortest[group.group]))


def _interval(prompts: Sequence[PromptMeasurement]) -> Interval | None:
    """95 % interval, not above what the drafter could reach at all; None where the prompts show no
    spread.
    """
    estimate = estimate_ratio(*acceptance_sums(prompts), origin=1.0, strata=slices_of(prompts))
    if estimate is None or estimate.standard_error == 0:
        return None
    low, high = estimate.interval()
    return low, min(high, 1.0 + max(len(prompt.accepted_by_position) for prompt in prompts))
