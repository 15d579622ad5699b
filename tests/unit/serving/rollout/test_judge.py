"""The judge's rules on records with known answers."""

from __future__ import annotations

import pytest

from components.contracts import Slot, now_utc
from components.serving.rollout.judge import build_step, judge_step, percentile, summarise
from components.serving.rollout.traffic import RequestRecord
from components.settings import CanarySettings

SETTINGS = CanarySettings(
    step_s=10, min_requests=2, min_requests_for_statistics=20, max_latency_ratio=3.0
)


def answers(
    num: int,
    *,
    slot: Slot = Slot.CANDIDATE,
    num_steps: int = 20,
    num_accepted: int = 20,
    latency_s: float = 1.0,
) -> list[RequestRecord]:
    """Requests of 41 tokens each: one from the prefill, 40 from 20 steps with one accepted draft
    each.
    """
    record = RequestRecord(
        slot=slot,
        ok=True,
        latency_s=latency_s,
        num_tokens=41,
        num_steps=num_steps,
        num_accepted=num_accepted,
    )
    return [record] * num


def failures(num: int, *, slot: Slot | None = Slot.CANDIDATE) -> list[RequestRecord]:
    return [RequestRecord(slot=slot, ok=False, latency_s=0.1, error="HTTP 500: broken")] * num


def judge(
    records: list[RequestRecord],
    *,
    elapsed_s: float = 10,
    gate: float | None = 2.0,
    coverage: float | None = 0.5,
) -> tuple[bool | None, str]:
    return judge_step(
        records,
        settings=SETTINGS,
        gate_acceptance_length=gate,
        elapsed_s=elapsed_s,
        min_draft_coverage=coverage,
    )


def test_healthy_step_names_its_numbers() -> None:
    healthy, reason = judge(answers(20) + answers(20, slot=Slot.BASELINE))
    assert healthy is True
    assert "acceptance length 2.000, at least 1.600 (gate 2.000)" in reason
    assert "p95 latency 1.00 x baseline" in reason


def test_errors_speak_at_once_even_in_a_young_step() -> None:
    healthy, reason = judge(failures(1) + answers(3), elapsed_s=0.1)
    assert healthy is False
    assert "1 of 4 candidate requests failed" in reason and "HTTP 500: broken" in reason


def test_errors_up_to_the_share_are_allowed() -> None:
    assert judge(failures(1) + answers(49))[0] is True
    assert judge(failures(1) + answers(48))[0] is False


def test_failure_that_no_arm_signed_counts_against_the_candidate() -> None:
    assert judge(failures(1, slot=None) + answers(5))[0] is False


def test_failures_that_the_splitter_hid_from_the_client_count() -> None:
    def judge_hidden(num_redispatched: int, status: str | None = None) -> tuple[bool | None, str]:
        return judge_step(
            answers(49), settings=SETTINGS, gate_acceptance_length=2.0, elapsed_s=10,
            num_redispatched=num_redispatched, candidate_status=status,
        )  # fmt: skip

    assert judge_hidden(1)[0] is True
    assert judge_hidden(2) == (
        False,
        "2 of 51 candidate requests failed, allowed 2.0%: the splitter sent them to the "
        "baseline instead",
    )
    assert judge_hidden(0, "DOWN") == (False, "the splitter finds the candidate DOWN")


def test_failures_of_the_baseline_do_not() -> None:
    assert judge(failures(5, slot=Slot.BASELINE) + answers(20))[0] is True


def test_undecided_while_young_or_unanswered() -> None:
    assert judge(answers(30), elapsed_s=9.9) == (None, "9.9 of 10 s")
    assert judge(answers(1)) == (None, "the candidate answered 1 of 2 requests needed")
    assert judge([]) == (None, "the candidate answered 0 of 2 requests needed")


def test_few_requests_are_judged_on_errors_alone() -> None:
    healthy, reason = judge(
        answers(4, num_accepted=0, latency_s=100) + answers(50, slot=Slot.BASELINE)
    )
    assert healthy is True
    assert "acceptance not judged (80 drafted steps, 100 needed)" in reason
    assert "latency not judged (4 and 50 requests, 20 of each needed)" in reason


def test_acceptance_needs_steps_not_requests() -> None:
    # Under a schedule with K = 0 at this load only the last tokens are drafted: 4.0 over 20 steps
    # says nothing, and neither does 1.0. Five requests that drafted all the way say enough.
    assert judge(answers(20, num_steps=1, num_accepted=3), coverage=None)[0] is True
    assert judge(answers(20, num_steps=1, num_accepted=0), coverage=None)[0] is True
    healthy, reason = judge(answers(5, num_accepted=0))
    assert healthy is False and "acceptance length 1.000, at least 1.600" in reason


@pytest.mark.parametrize(("num_accepted", "healthy"), [(12, True), (11, False)])
def test_acceptance_against_the_gate(num_accepted: int, healthy: bool) -> None:
    # (12 + 20) / 20 = 1.6 is the least allowed: 0.8 of 2.0
    assert judge(answers(20, num_accepted=num_accepted))[0] is healthy


def test_no_gate_judges_no_acceptance() -> None:
    assert judge(answers(20, num_accepted=0), gate=None, coverage=None)[0] is True


def test_drafter_that_is_not_used() -> None:
    healthy, reason = judge(answers(20, num_steps=0, num_accepted=0))
    assert healthy is False and "draft coverage 0.00" in reason
    assert judge(answers(20, num_steps=0, num_accepted=0), coverage=None)[0] is True


@pytest.mark.parametrize(("latency_s", "healthy"), [(3.0, True), (3.1, False)])
def test_latency_against_the_baseline(latency_s: float, healthy: bool) -> None:
    assert judge(answers(20, latency_s=latency_s) + answers(20, slot=Slot.BASELINE))[0] is healthy


def test_latency_needs_enough_of_the_baseline() -> None:
    assert judge(answers(20, latency_s=99) + answers(19, slot=Slot.BASELINE))[0] is True


def test_percentile_is_the_nearest_rank() -> None:
    assert percentile([1.0], 95) == 1.0
    assert percentile([float(value) for value in range(1, 21)], 95) == 19.0
    assert percentile([float(value) for value in range(1, 21)], 50) == 10.0


def test_step_record() -> None:
    step = build_step(
        answers(2) + failures(1, slot=Slot.BASELINE),
        weight_percent=5, started_at=now_utc(), duration_s=12.0, healthy=True, reason="fine",
    )  # fmt: skip
    assert step.num_requests == {"candidate": 2, "baseline": 1}
    assert step.num_errors == {"candidate": 0, "baseline": 1}
    assert step.acceptance_length == 2.0
    assert step.draft_coverage == pytest.approx(40 / 41)
    assert step.latency_p95_s == {"candidate": 1.0, "baseline": None}


def test_arm_without_steps_has_no_acceptance_length() -> None:
    traffic = summarise(answers(3, num_steps=0, num_accepted=0), "candidate")
    assert traffic.acceptance_length is None and traffic.draft_coverage == 0.0
