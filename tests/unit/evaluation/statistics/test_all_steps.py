"""Steps from counts: the bounds hold the truth, and are exact for what drafts at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from components.contracts import PromptMeasurement, digest_json
from components.evaluation.statistics.all_steps import all_step_length, step_bounds

MOST_DRAFTS = 3
STEP = st.one_of(st.none(), st.integers(0, MOST_DRAFTS))
"""A target step: None without a draft, else how many drafts it accepted."""


def counted(steps: Sequence[int | None], cut: int) -> PromptMeasurement:
    """What the engine tells of these steps after a prefill; `cut` tokens of the last are behind the
    answer's end.
    """
    drafted = [one for one in steps if one is not None]
    num_committed = sum((one or 0) + 1 for one in steps)
    return PromptMeasurement(
        prompt_id="p",
        slice="a",
        num_prompt_tokens=5,
        num_output_tokens=1 + num_committed - cut,
        num_steps=len(drafted),
        num_draft_tokens=MOST_DRAFTS * len(drafted),
        num_accepted_tokens=sum(drafted),
        accepted_by_position=tuple(
            sum(one > place for one in drafted) for place in range(MOST_DRAFTS)
        ),
        latency_s=0.1,
        output_digest=digest_json("x"),
    )


@given(st.lists(STEP, max_size=12), st.integers(0, MOST_DRAFTS))
def test_the_true_number_of_steps_lies_within_the_bounds(steps: list[int | None], cut: int) -> None:
    cut = min(cut, (steps[-1] or 0) if steps else 0)
    bounds = step_bounds(counted(steps, cut))
    assert bounds.fewest <= len(steps) <= bounds.most
    assert bounds.num_kept == sum((one or 0) + 1 for one in steps) - cut


@given(st.lists(st.integers(0, MOST_DRAFTS), max_size=12), st.integers(0, MOST_DRAFTS))
def test_fewest_is_exact_where_every_step_had_a_draft(steps: list[int], cut: int) -> None:
    cut = min(cut, steps[-1] if steps else 0)
    assert step_bounds(counted(steps, cut)).fewest == len(steps)


def test_a_length_counts_the_steps_without_a_draft() -> None:
    # Two drafted steps that keep 4 and 3 tokens, and five that keep one each: 12 tokens in 7 steps.
    prompt = counted([3, None, None, 2, None, None, None], 0)
    assert all_step_length([prompt]) == pytest.approx(12 / 7)
    # The most steps: the last may have been the one with 3 accepted, all cut, so 12 = steps + 5 -
    # 3.
    assert all_step_length([prompt], at_most=True) == pytest.approx(12 / 10)


def test_without_drafts_each_step_keeps_one_token() -> None:
    assert all_step_length([counted([None] * 9, 0)]) == 1.0
    assert all_step_length([counted([None] * 9, 0)], at_most=True) == 1.0


def test_an_answer_of_one_token_has_no_step(measurement: Callable[..., PromptMeasurement]) -> None:
    assert all_step_length([measurement("one", num_output_tokens=1)]) == 1.0
