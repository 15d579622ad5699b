"""Every rule of the gate on both sides of its limit; what was not measured is never a pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.contracts import AcceptanceReport, GateDecision, PromptMeasurement, Verdict
from components.errors import EvaluationError
from components.evaluation.requests.compatibility import RULE as COMPATIBILITY
from components.evaluation.rules.decide import decide, overall_verdict
from components.settings import GateSettings

SETTINGS = GateSettings(min_acceptance_length=1.2, min_speedup=None)
GOOD = (10, 6, 4)  # acceptance length 1.7, first position 0.5


@pytest.fixture
def prompts(
    measurement: Callable[..., PromptMeasurement],
) -> Callable[..., list[PromptMeasurement]]:
    def make(
        histogram: tuple[int, ...] = GOOD, *, num: int = 10, slice_name: str = "a"
    ) -> list[PromptMeasurement]:
        # Two kinds of prompts, so that intervals have a width.
        more = (histogram[0] + 2, *histogram[1:])
        return [
            measurement(
                f"{slice_name}/{n}", slice_name=slice_name, histogram=histogram if n % 2 else more
            )
            for n in range(num)
        ]

    return make


@pytest.fixture
def served(report: Any, arm: Any, prompts: Any) -> Callable[..., AcceptanceReport]:
    """A report of these prompts of the candidate, half again as fast as no draft, as the demo's
    recipe asks for.
    """

    def make(candidate: Any = None, *others: Any, **told: Any) -> AcceptanceReport:
        answered = prompts() if candidate is None else candidate
        arms = (
            arm("candidate", answered, num_draft_tokens=2, rates={1: 60.0}),
            arm("no_draft", answered, rates={1: 40.0}),
        )
        return report(*arms, *others, **told)

    return make


def rules(decision: GateDecision) -> dict[str, Verdict]:
    return {rule.rule: rule.verdict for rule in decision.rules}


def test_a_good_candidate_passes(report: Any, arm: Any, prompts: Any) -> None:
    decision = decide(report(arm("candidate", prompts(), num_draft_tokens=2)), settings=SETTINGS)
    assert decision.verdict is Verdict.PASS
    assert set(rules(decision)) == {
        "finite figures",
        "figures follow from the prompts",
        "acceptance length",
        "position collapse",
        "draft coverage",
        "losslessness",
        COMPATIBILITY,
    }
    assert decision.settings == SETTINGS.model_dump(mode="json")
    assert decision.champion_digest is None


@pytest.mark.parametrize(
    ("limit", "verdict"), [(1.1, "pass"), (1.65, "inconclusive"), (2.1, "fail")]
)
def test_acceptance_length_against_its_interval(
    limit: float, verdict: str, report: Any, arm: Any, prompts: Any
) -> None:
    settings = GateSettings(min_acceptance_length=limit, min_speedup=None)
    decision = decide(report(arm("candidate", prompts(), num_draft_tokens=2)), settings=settings)
    assert rules(decision)["acceptance length"] == decision.verdict == verdict


def test_position_collapse_fails(report: Any, arm: Any, prompts: Any) -> None:
    settings = GateSettings(min_acceptance_length=1.0, min_position_acceptance=0.1)
    decision = decide(
        report(arm("candidate", prompts((40, 1, 0)), num_draft_tokens=2)), settings=settings
    )
    assert rules(decision)["position collapse"] is Verdict.FAIL
    assert decision.verdict is Verdict.FAIL


def test_zero_drafts_fail(report: Any, arm: Any, measurement: Any) -> None:
    silent = [measurement(f"a/{n}", histogram=(0, 0, 0), num_output_tokens=20) for n in range(10)]
    decision = decide(
        report(arm("candidate", silent, num_draft_tokens=2)),
        settings=GateSettings(min_acceptance_length=1),
    )
    assert decision.verdict is Verdict.FAIL
    assert rules(decision)["acceptance length"] is Verdict.FAIL
    assert rules(decision)["draft coverage"] is Verdict.FAIL


def test_one_prompt_is_inconclusive(report: Any, arm: Any, prompts: Any) -> None:
    decision = decide(
        report(arm("candidate", prompts(num=1), num_draft_tokens=2)), settings=SETTINGS
    )
    assert decision.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("histogram", "verdict"),
    [((10, 6, 5), "pass"), (GOOD, "pass"), ((14, 6, 2), "fail"), ((11, 6, 4), "inconclusive")],
)
def test_non_inferiority_per_slice(
    histogram: tuple[int, ...], verdict: str, report: Any, arm: Any, prompts: Any, measurement: Any
) -> None:
    # On slice b the candidate equals the champion; slice a decides.
    same = prompts(slice_name="b")
    ours = [
        measurement(p.prompt_id, histogram=histogram if n % 2 else GOOD)
        for n, p in enumerate(prompts())
    ]
    if verdict == "fail":
        ours = prompts(histogram)
    champion = arm("champion", prompts(GOOD) + same, num_draft_tokens=2)
    decision = decide(
        report(arm("candidate", ours + same, num_draft_tokens=2), champion), settings=SETTINGS
    )
    told = rules(decision)
    assert told["non-inferior on b"] is Verdict.PASS
    if verdict != "inconclusive":
        assert told["non-inferior on a"] == verdict
    assert decision.champion_digest == champion.checkpoint_digest


def test_a_slice_with_one_prompt_is_inconclusive_against_a_champion(
    report: Any, arm: Any, prompts: Any
) -> None:
    both = prompts() + prompts(num=1, slice_name="b")
    arms = (arm("candidate", both, num_draft_tokens=2), arm("champion", both, num_draft_tokens=2))
    decision = decide(report(*arms), settings=SETTINGS)
    assert rules(decision)["non-inferior on b"] is Verdict.INCONCLUSIVE
    assert decision.verdict is Verdict.INCONCLUSIVE


def test_champion_on_other_prompts_cannot_be_compared(report: Any, arm: Any, prompts: Any) -> None:
    arms = (
        arm("candidate", prompts(), num_draft_tokens=2),
        arm("champion", prompts(num=9), num_draft_tokens=2),
    )
    with pytest.raises(EvaluationError, match="same prompts"):
        decide(report(*arms), settings=SETTINGS)


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [({1: 60.0}, "pass"), ({1: 41.0}, "fail"), ({4: 60.0}, "inconclusive"), ({}, "inconclusive")],
)
def test_speed_up_at_one(
    rates: dict[int, float], verdict: str, report: Any, arm: Any, prompts: Any
) -> None:
    plain = arm("no_draft", prompts(), rates={1: 40.0, 4: 100.0})
    settings = GateSettings(min_acceptance_length=1.2, min_speedup=1.1)
    decision = decide(
        report(arm("candidate", prompts(), num_draft_tokens=2, rates=rates), plain),
        settings=settings,
    )
    assert rules(decision)["speed-up at 1 in flight"] == decision.verdict == verdict


def test_a_drafter_slower_than_none_is_no_pass_unless_the_recipe_says_so(
    report: Any, arm: Any, prompts: Any
) -> None:
    plain = arm("no_draft", prompts(), rates={1: 40.0})
    slow = report(arm("candidate", prompts(), num_draft_tokens=2, rates={1: 38.0}), plain)
    assert decide(slow, settings=GateSettings(min_acceptance_length=1.2)).verdict is Verdict.FAIL
    assert decide(slow, settings=SETTINGS).verdict is Verdict.PASS
    unmeasured = report(arm("candidate", prompts(), num_draft_tokens=2))
    assert (
        decide(unmeasured, settings=GateSettings(min_acceptance_length=1.2)).verdict
        is Verdict.INCONCLUSIVE
    )


def test_nan_fails(report: Any, arm: Any, prompts: Any) -> None:
    broken = arm("candidate", prompts(), num_draft_tokens=2).model_copy(
        update={"acceptance_length": float("nan")}
    )
    decision = decide(report(broken), settings=SETTINGS)
    assert decision.verdict is Verdict.FAIL
    assert "candidate.acceptance_length" in decision.rules[0].detail


def test_report_about_another_target_fails(report: Any, arm: Any, prompts: Any) -> None:
    about = report(arm("candidate", prompts(), num_draft_tokens=2))
    ours = about.target.fingerprint
    decision = decide(about, settings=SETTINGS, expected_fingerprint=ours)
    assert decision.verdict is Verdict.PASS
    other = ours.model_copy(update={"weights": "f" * 64})
    decision = decide(about, settings=SETTINGS, expected_fingerprint=other)
    assert decision.verdict is Verdict.FAIL
    assert (
        "weights differ" in next(r for r in decision.rules if r.rule == "target fingerprint").detail
    )


def test_no_candidate_is_not_measured(report: Any, arm: Any, prompts: Any) -> None:
    with pytest.raises(EvaluationError, match="no candidate"):
        decide(report(arm("no_draft", prompts())), settings=SETTINGS)


def test_same_decision_from_the_file(report: Any, arm: Any, prompts: Any, tmp_path: Path) -> None:
    champion = arm("champion", prompts(), num_draft_tokens=2)
    first = report(
        arm("candidate", prompts((10, 6, 5)), num_draft_tokens=2, rates={1: 5.0}), champion
    )
    again = AcceptanceReport.read(first.write(tmp_path / "report.json"))
    assert decide(again, settings=SETTINGS).digest == decide(first, settings=SETTINGS).digest


def test_overall_verdict() -> None:
    assert overall_verdict([Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL]) is Verdict.FAIL
    assert overall_verdict([Verdict.PASS, Verdict.INCONCLUSIVE]) is Verdict.INCONCLUSIVE
    assert overall_verdict([]) is Verdict.INCONCLUSIVE
