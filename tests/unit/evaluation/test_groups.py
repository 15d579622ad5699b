"""Acceptance by length and language on prompts whose right values are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from components.contracts import ArmReport, PromptMeasurement
from components.evaluation.groups import (
    NOT_TOLD,
    acceptance_by_group,
    acceptance_groups,
    language_of_prompt,
    length_band,
)


@pytest.mark.parametrize(
    ("num_tokens", "band"),
    [
        (1, "up to 64"), (64, "up to 64"), (65, "65 to 256"), (256, "65 to 256"),
        (1024, "257 to 1,024"),
        (4096, "1,025 to 4,096"), (4097, "more than 4,096"),
    ],
)  # fmt: skip
def test_bands_end_inclusively(
    measurement: Callable[..., PromptMeasurement], num_tokens: int, band: str
) -> None:
    assert (
        length_band(measurement("a/1").model_copy(update={"num_prompt_tokens": num_tokens})) == band
    )


@pytest.fixture
def prompts(measurement: Callable[..., PromptMeasurement]) -> list[PromptMeasurement]:
    """Three English ones of 2 tokens a step and more, two German ones of exactly 3, one without a
    step.
    """
    chosen = [
        ("a/1", (4, 4, 0), 10, "en"), ("a/2", (2, 6, 0), 70, "en"), ("a/3", (6, 2, 0), 5000, "en"),
        ("a/4", (0, 0, 5), 300, "de"), ("a/5", (0, 0, 5), 300, "de"), ("a/6", (0, 0, 0), 300, "de"),
        ("a/7", (5, 5, 0), 20, None),
    ]  # fmt: skip
    return [
        measurement(name, histogram=histogram).model_copy(
            update={"num_prompt_tokens": size, "language": language}
        )
        for name, histogram, size, language in chosen
    ]


def test_groups_are_ratios_of_sums_largest_first(prompts: list[PromptMeasurement]) -> None:
    english, german, untold = acceptance_by_group(prompts, language_of_prompt)
    # 12 accepted, 24 steps.
    assert (english.group, english.num_prompts, english.acceptance_length) == (
        "en",
        3,
        1.5,
    )
    assert english.interval is not None and 1 < english.interval[0] < 1.5 < english.interval[1] <= 3
    assert (german.group, german.num_prompts, german.acceptance_length) == ("de", 2, 3.0)
    # Alike is not certain.
    assert german.interval is not None and german.interval[0] < 2 < german.interval[1] == 3
    assert (untold.group, untold.num_prompts, untold.interval) == (NOT_TOLD, 1, None)


def test_an_interval_ends_at_what_can_be_accepted(
    measurement: Callable[..., PromptMeasurement],
) -> None:
    unlike = [measurement("a/1", histogram=(8, 2)), measurement("a/2", histogram=(1, 9))]
    (group,) = acceptance_by_group(unlike, language_of_prompt)
    assert group.acceptance_length == pytest.approx(1.55)
    # One draft token and the bonus token.
    assert group.interval is not None and group.interval[1] == 2.0


def test_drafting_arms_by_length_in_the_order_of_bands(
    prompts: list[PromptMeasurement],
    measurement: Callable[..., PromptMeasurement],
    arm: Callable[..., ArmReport],
) -> None:
    plain = arm("no_draft", [measurement("a/1")])
    (groups,) = acceptance_groups([plain, arm("candidate", prompts, num_draft_tokens=2)])
    assert groups.arm == "candidate"
    assert [(one.group, one.num_prompts) for one in groups.by_length] == [
        ("up to 64", 2), ("65 to 256", 1), ("257 to 1,024", 2), ("more than 4,096", 1),
    ]  # fmt: skip
    assert sum(one.num_prompts for one in groups.by_language) == 6
