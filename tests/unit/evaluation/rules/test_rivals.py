"""Rivals: what is asked for, what is refused, and how a candidate stands to one; the section of the
page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from components.contracts import (
    AcceptanceReport,
    ArmEndpoint,
    ArmReport,
    PromptMeasurement,
    Rival,
    Standing,
    Verdict,
)
from components.errors import EvaluationError
from components.evaluation.acceptance import Measured
from components.evaluation.rules.rivals import (
    MeasuredRival,
    beaten_by,
    measure_rival,
    rival_rules,
    rivals_of,
    with_rivals,
)
from components.reporting.gate.rivals import rivals_section
from components.settings import EvaluationSettings, GateSettings

Make = Callable[..., PromptMeasurement]
NGRAM = Rival(method="ngram", num_draft_tokens=3)
GATE = GateSettings(min_prompts_per_slice=4)
GOOD, BAD = (2, 2, 6, 6), (8, 4, 2, 1)
"""Steps that accepted 0, 1, 2, 3 drafts."""


def answers(
    make: Make, histogram: Sequence[int], *, slices: Sequence[str] = "ab", num: int = 12
) -> list:
    """`num` prompts a slice; every third has one more step that accepted nothing, so that lengths
    differ.
    """
    return [
        make(f"{name}{k}", slice_name=name, histogram=(histogram[0] + (k % 3 == 0), *histogram[1:]))
        for name in slices
        for k in range(num)
    ]


def undrafted(make: Make, *, num: int = 12) -> list[PromptMeasurement]:
    """As vLLM tells of a request for which nothing was found to copy: a histogram of zeros."""
    return [
        make(f"{name}{k}", slice_name=name, histogram=(0, 0, 0, 0), num_output_tokens=30)
        for name in "ab"
        for k in range(num)
    ]


def measured(
    prompts: Sequence[PromptMeasurement], *, method: str = "ngram", version: str = "0.0"
) -> MeasuredRival:
    rival = Rival(method=method, num_draft_tokens=3)
    endpoint = ArmEndpoint(arm=method, url="http://r", model="m", rival=rival)
    return MeasuredRival(
        rival, Measured(endpoint, tuple(prompts), {}, {}, version), speed=(), no_draft_speed=()
    )


@pytest.fixture
def candidate(
    measurement: Make, arm: Callable[..., ArmReport], report: Callable[..., AcceptanceReport]
) -> AcceptanceReport:
    return report(arm("candidate", answers(measurement, GOOD), num_draft_tokens=3))


def standings(report: AcceptanceReport) -> dict[str | None, Standing]:
    return {one.slice: one.standing for one in beaten_by(report, GATE)}


def test_the_recipe_names_the_rivals() -> None:
    slices = {"mt_bench": 4}
    asked = EvaluationSettings(
        slices=slices, rivals=("ngram", "suffix"), rival_draft_tokens=6, ngram_lookup=(3, 4)
    )
    assert [(one.method, one.num_draft_tokens, one.lookup) for one in rivals_of(asked)] == [
        ("ngram", 6, (3, 4)),
        ("suffix", 6, (3, 4)),
    ]
    assert rivals_of(EvaluationSettings(slices=slices)) == ()


def test_a_candidate_that_keeps_more_per_step_is_better_everywhere(
    candidate: AcceptanceReport, measurement: Make
) -> None:
    report = with_rivals(candidate, [measured(answers(measurement, BAD))])
    assert standings(report) == dict.fromkeys((None, "a", "b"), Standing.BETTER)
    (rule,) = rival_rules(beaten_by(report, GATE))
    assert rule.verdict is Verdict.PASS
    assert not rule.binding


def test_a_rival_that_keeps_more_is_told_by_slice(
    measurement: Make, arm: Callable[..., ArmReport], report: Callable[..., AcceptanceReport]
) -> None:
    ours = answers(measurement, GOOD, slices="a") + answers(measurement, BAD, slices="b")
    theirs = answers(measurement, BAD, slices="a") + answers(measurement, GOOD, slices="b")
    told = with_rivals(report(arm("candidate", ours, num_draft_tokens=3)), [measured(theirs)])
    found = standings(told)
    assert found["a"] is Standing.BETTER
    assert found["b"] is Standing.WORSE
    page = rivals_section(told, beaten_by(told, GATE))
    assert "Against ngram: worse on b" in page


def test_the_very_same_answers_are_neither_better_nor_worse(candidate: AcceptanceReport) -> None:
    report = with_rivals(candidate, [measured(candidate.arms["candidate"].prompts)])
    assert set(standings(report).values()) == {Standing.NOT_SHOWN}
    (rule,) = rival_rules(beaten_by(report, GATE))
    assert rule.verdict is Verdict.INCONCLUSIVE


def test_a_rival_that_never_drafts_keeps_one_token_per_step(
    candidate: AcceptanceReport, measurement: Make
) -> None:
    overall = beaten_by(with_rivals(candidate, [measured(undrafted(measurement))]), GATE)[0]
    assert overall.rival_length == 1.0
    assert overall.standing is Standing.BETTER


def test_a_length_over_drafted_steps_alone_does_not_flatter_a_rival(
    candidate: AcceptanceReport, measurement: Make
) -> None:
    # Each answer: one drafted step of four tokens, and 25 tokens of steps without a draft.
    few = [
        measurement(f"{name}{k}", slice_name=name, histogram=(0, 0, 0, 1), num_output_tokens=30)
        for name in "ab"
        for k in range(12)
    ]
    report = with_rivals(candidate, [measured(few)])
    assert report.rivals[0].arm.acceptance_length == 4.0
    assert beaten_by(report, GATE)[0].rival_length == pytest.approx(29 / 26)
    assert standings(report)[None] is Standing.BETTER


def test_a_slice_of_few_prompts_has_no_standing(
    measurement: Make, arm: Callable[..., ArmReport], report: Callable[..., AcceptanceReport]
) -> None:
    ours = answers(measurement, GOOD, slices="a") + answers(measurement, GOOD, slices="b", num=3)
    theirs = answers(measurement, BAD, slices="a") + answers(measurement, BAD, slices="b", num=3)
    found = standings(
        with_rivals(report(arm("candidate", ours, num_draft_tokens=3)), [measured(theirs)])
    )
    assert found["a"] is Standing.BETTER
    assert found["b"] is Standing.NOT_SHOWN


def test_a_rival_must_have_answered_the_candidates_prompts(
    candidate: AcceptanceReport, measurement: Make
) -> None:
    with pytest.raises(EvaluationError, match="did not answer the candidate's prompts"):
        with_rivals(candidate, [measured(answers(measurement, BAD)[1:])])
    with pytest.raises(EvaluationError, match="another engine version"):
        with_rivals(candidate, [measured(answers(measurement, BAD), version="0.1")])
    with pytest.raises(EvaluationError, match="measured twice"):
        with_rivals(candidate, [measured(answers(measurement, BAD))] * 2)


def test_a_rival_is_timed_in_turns_with_no_draft(
    measurement: Make, speed_points: Callable[..., tuple]
) -> None:
    plain = ArmEndpoint(arm="no_draft", url="http://p", model="m")
    engine = ArmEndpoint(arm="candidate", url="http://r", model="m", rival=NGRAM)
    asked: list[list[str]] = []

    def speed(arms: Sequence[ArmEndpoint], _: object) -> dict[str, tuple]:
        asked.append([one.arm for one in arms])
        return {"ngram": speed_points({1: 120}), "no_draft": speed_points({1: 100})}

    def measure(arm: ArmEndpoint, _: object) -> Measured:
        assert arm.arm == "ngram"
        return Measured(arm, tuple(answers(measurement, BAD)), {}, {}, "0.0")

    found = measure_rival(engine, plain, [], measure=measure, speed=speed)
    assert asked == [["ngram", "no_draft"]]
    assert found.speed[0].output_tokens_per_s == pytest.approx(
        1.2 * found.no_draft_speed[0].output_tokens_per_s
    )
    with pytest.raises(EvaluationError, match="serves no rival"):
        measure_rival(plain, plain, [], measure=measure, speed=speed)


def test_the_page_shows_lengths_and_standings(
    candidate: AcceptanceReport, measurement: Make
) -> None:
    report = with_rivals(
        candidate,
        [measured(answers(measurement, BAD)), measured(undrafted(measurement), method="suffix")],
    )
    page = rivals_section(report, beaten_by(report, GATE))
    assert "Against ngram: better on every slice." in page
    assert "candidate against suffix" in page
    assert rivals_section(candidate, []) == ""
