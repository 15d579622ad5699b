"""Where two greedy answers part, what the plain engine thought there, and how far its gaps
moved.
"""

from __future__ import annotations

import pytest

from components.contracts import Divergence
from components.evaluation.outputs.greedy_answers import (
    GreedyAnswer,
    compare_with_itself,
    digest_tokens,
    divergence,
    gap_changes,
)


def answer(tokens: list[int], gaps: list[float] | None = None) -> GreedyAnswer:
    """Each token with log-probability 0 and token + 100 as second best, `gaps` below it, token +
    200 far below.
    """
    top = tuple(
        ((token, 0.0), (token + 100, -gap), (token + 200, -9.0))
        for token, gap in zip(tokens, gaps or [], strict=False)
    )
    return GreedyAnswer(tuple(tokens), top)


def test_equal_answers_do_not_part() -> None:
    assert divergence(answer([1, 2, 3], [1, 1, 1]), answer([1, 2, 3])) is None


def test_the_margin_is_that_of_the_other_token() -> None:
    plain = answer([1, 2, 3], [1.0, 0.25, 1.0])
    assert divergence(plain, answer([1, 102, 9])) == Divergence(position=1, margin_nats=0.25)
    assert divergence(plain, answer([1, 202, 3])) == Divergence(position=1, margin_nats=9.0)


def test_a_token_the_plain_engine_did_not_tell_of_is_at_least_as_far_as_the_last_it_told() -> None:
    parted = divergence(answer([1, 2], [1.0, 0.25]), answer([1, 77]))
    assert parted == Divergence(position=1, margin_nats=9.0, is_lower_bound=True)


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3]])
def test_an_answer_that_was_cut_parts_without_a_margin(tokens: list[int]) -> None:
    assert divergence(answer([1, 2], [1.0, 1.0]), answer(tokens)) == Divergence(
        position=min(2, len(tokens)), margin_nats=None
    )


def test_gaps_change_up_to_the_token_at_which_answers_part() -> None:
    first = answer([1, 2, 3, 4], [1.0, 0.25, 0.5, 0.5])
    # At the third token the second best won by 0.125: its gap moved by 0.5 + 0.125. The fourth has
    # another context.
    again = GreedyAnswer(
        (1, 2, 103, 4),
        (
            ((1, 0.0), (101, -0.75)),
            ((2, 0.0), (102, -0.375)),
            ((103, 0.0), (3, -0.125)),
            ((4, 0.0), (104, -3.0)),
        ),
    )
    assert list(gap_changes(first, again)) == pytest.approx([0.25, 0.125, 0.625])


def test_gaps_that_no_rounding_closes_do_not_count() -> None:
    assert list(gap_changes(answer([1], [5.0]), answer([1], [5.5]))) == []


def test_the_plain_engine_against_itself() -> None:
    plain = {"a": answer([1, 2], [1.0, 0.25]), "b": answer([5], [0.5]), "c": answer([6], [1.0])}
    again = {"a": answer([1, 102], [1.0, 1.0]), "b": answer([5], [0.75])}
    compared = compare_with_itself(plain, again, num_in_flight=20)
    assert compared.num_compared == 2
    assert compared.divergences == {"a": Divergence(position=1, margin_nats=0.25)}
    assert compared.digests == {"a": digest_tokens([1, 102]), "b": digest_tokens([5])}
    # 'a' tells 102 and 202 at its second token, not 2: no gap of the same two tokens there.
    assert (compared.num_gaps, compared.max_gap_change_nats) == (2, pytest.approx(0.25))
