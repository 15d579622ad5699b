"""Outputs at work against the plain engine's answers: ties are excused, anything else is a fault,
cut answers fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from components.contracts import AcceptanceReport, PlainAnswer, PlainAnswers, SelfComparison
from components.errors import EvaluationError
from components.evaluation.outputs.greedy_answers import digest_tokens
from components.evaluation.outputs.watch import OutputWatch

TOKENS = (1, 2, 3, 4)
GAP = 0.1
NAMES = tuple(f"a/{n}" for n in range(20))


def plain_answers(tokens: tuple[int, ...] = TOKENS) -> PlainAnswers:
    """Each token with a second best, 100 above it, `GAP` below, and a third, 200 above it, far
    below.
    """
    top = tuple(((token, 0.0), (token + 100, -GAP), (token + 200, -6.0)) for token in tokens)
    return PlainAnswers(answers={name: PlainAnswer(token_ids=tokens, top=top) for name in NAMES})


@pytest.fixture
def measured(report: Any, arm: Any, measurement: Any) -> Callable[[], AcceptanceReport]:
    def make() -> AcceptanceReport:
        def told(*, histogram: tuple[int, ...]) -> list[Any]:
            return [
                measurement(name, histogram=histogram).model_copy(
                    update={"output_digest": digest_tokens(TOKENS)}
                )
                for name in NAMES
            ]

        itself = SelfComparison(
            num_in_flight=20,
            digests={name: digest_tokens(TOKENS) for name in NAMES},
            divergences={},
            num_gaps=800,
            max_gap_change_nats=0.1,
        )
        arms = (
            arm("candidate", told(histogram=(3, 1)), num_draft_tokens=1),
            arm("no_draft", told(histogram=())),
        )
        made: AcceptanceReport = report(*arms, itself=[itself])
        return made

    return make


@pytest.fixture
def watch(measured: Any) -> OutputWatch:
    return OutputWatch(measured(), plain_answers(), alpha=0.005)


def test_equal_answers_and_ties_are_the_targets_own(watch: OutputWatch) -> None:
    assert watch.fault() is None
    watch.add("a/0", TOKENS, was_cut=False)
    watch.add("a/1", (1, 102, 9, 9), was_cut=False)
    assert watch.num_compared == 2 and watch.fault() is None


def test_a_token_far_from_the_targets_is_a_fault(watch: OutputWatch) -> None:
    watch.add("a/0", (1, 202, 3, 4), was_cut=False)
    fault = watch.fault()
    assert (
        fault is not None
        and "1 of 1 outputs part from the target's own, by up to 6.00 nats" in fault
    )


def test_more_partings_than_the_machines_own_are_a_fault(watch: OutputWatch) -> None:
    """The plain engine never parted from itself, so n ties have p = 2^-n; the level is 0.005 / 3 /
    20 = 2^-13.55.
    """
    for name in NAMES[:13]:
        watch.add(name, (101, 2, 3, 4), was_cut=False)
    assert watch.fault() is None
    watch.add(NAMES[13], (101, 2, 3, 4), was_cut=False)
    assert watch.fault() is not None


def test_a_shorter_limit_compares_what_both_hold_and_an_early_end_is_a_fault(
    watch: OutputWatch,
) -> None:
    watch.add("a/0", TOKENS[:2], was_cut=True)
    assert watch.fault() is None
    watch.add("a/1", TOKENS[:2], was_cut=False)
    assert watch.fault() is not None


def test_only_the_first_answer_to_a_known_prompt_counts(watch: OutputWatch) -> None:
    watch.add("a/0", TOKENS, was_cut=False)
    watch.add("a/0", (9, 9, 9, 9), was_cut=False)
    watch.add("nobody's", (9, 9, 9, 9), was_cut=False)
    assert watch.num_compared == 1 and watch.fault() is None


def test_answers_of_another_gate_are_refused(measured: Any) -> None:
    with pytest.raises(EvaluationError, match="not those of the gate's report"):
        OutputWatch(measured(), plain_answers((5, 6)), alpha=0.005)
    with pytest.raises(EvaluationError, match="not those of the gate's report"):
        OutputWatch(measured(), PlainAnswers(answers={}), alpha=0.005)
