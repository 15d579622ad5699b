"""Rules beyond acceptance: positions, superiority, speed at the serving load, memory, the gap,
temperatures.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from scipy import stats

from components.contracts import (
    GateDecision,
    RuleResult,
    TemperatureReport,
    TrainServedGap,
    Verdict,
)
from components.evaluation.rules.decide import decide
from components.evaluation.rules.looks import spent
from components.settings import GateSettings

FIRST_LEVEL = 1 - spent(0.025, 1)
"""One-sided, of the first look at `alpha`'s default."""

K4 = (40, 20, 12, 8, 20)


@pytest.fixture
def prompts(measurement: Any) -> Any:
    def make(histogram: tuple[int, ...] = K4, *, num: int = 12, slice_name: str = "a") -> list[Any]:
        # A third of the prompts differ a little, so that intervals have a width.
        return [
            measurement(
                f"{slice_name}/{n:02}",
                slice_name=slice_name,
                histogram=(histogram[0] + 3 * (n % 3), *histogram[1:]),
            )
            for n in range(num)
        ]

    return make


def rule(decision: GateDecision, name: str) -> RuleResult:
    return next(result for result in decision.rules if result.rule == name)


def test_a_later_position_that_collapsed_fails(report: Any, arm: Any, prompts: Any) -> None:
    """Position 3 accepts 1 of 41 of the drafts that got there; the first two are well."""
    settings = GateSettings(min_acceptance_length=1.0)
    told = rule(
        decide(
            report(arm("candidate", prompts((40, 20, 40, 1, 0)), num_draft_tokens=4)),
            settings=settings,
        ),
        "position collapse",
    )
    assert told.verdict is Verdict.FAIL
    assert "position 3 is below the floor" in told.detail and "position 2" not in told.detail
    # Value and interval are the first position's: 61 of 101 steps and a few more accepted it.
    assert told.value == pytest.approx(12 * 61 / sum(101 + 3 * (n % 3) for n in range(12)))
    assert told.interval is not None and told.interval[0] < told.value < told.interval[1]
    assert told.threshold == settings.min_position_acceptance
    assert told.p_values["first position reaches the floor"] < 0.001


def test_a_position_with_few_drafts_is_not_called_collapsed(
    report: Any, arm: Any, prompts: Any
) -> None:
    # 16 drafts reach position 3, none is accepted: exp(-1.6) at a floor of 0.1.
    few = prompts((60, 40, 2, 0, 0), num=8)
    told = rule(
        decide(
            report(arm("candidate", few, num_draft_tokens=4)),
            settings=GateSettings(min_acceptance_length=1),
        ),
        "position collapse",
    )
    assert (
        told.verdict is Verdict.FAIL
        and "position 2" in told.detail
        and "position 3" not in told.detail
    )


def test_a_position_far_below_the_champions_fails(report: Any, arm: Any, prompts: Any) -> None:
    settings = GateSettings(
        min_acceptance_length=1.0, min_position_acceptance=0.02, non_inferiority_margin=0.9
    )
    candidate = arm("candidate", prompts((40, 48, 4, 4, 4)), num_draft_tokens=4)
    decision = decide(
        report(candidate, arm("champion", prompts(), num_draft_tokens=4)), settings=settings
    )
    told = rule(decision, "position collapse")
    assert (
        told.verdict is Verdict.FAIL
        and "position 2 is over 50% below the champion's" in told.detail
    )


def test_a_champion_that_accepts_nothing_at_a_position_says_nothing_about_it(
    report: Any, arm: Any, prompts: Any
) -> None:
    """A minute of training gives such champions: there is no share to be below of."""
    champion = arm("champion", prompts((60, 20, 4, 2, 0)), num_draft_tokens=4)
    candidate = arm("candidate", prompts((40, 30, 8, 4, 2)), num_draft_tokens=4)
    settings = GateSettings(min_acceptance_length=1.0, min_position_acceptance=0.02)
    assert (
        rule(decide(report(candidate, champion), settings=settings), "position collapse").verdict
        is Verdict.PASS
    )
    nothing = arm("candidate", prompts((50, 0, 0, 0, 0)), num_draft_tokens=4)
    assert decide(report(nothing, champion), settings=settings).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("histogram", "required", "verdict", "superior"),
    [
        ((40, 20, 12, 8, 24), False, Verdict.PASS, True),
        ((40, 20, 12, 8, 20), False, Verdict.PASS, False),
        ((40, 20, 12, 8, 20), True, Verdict.INCONCLUSIVE, False),
        ((40, 20, 12, 8, 24), True, Verdict.PASS, True),
        ((42, 20, 12, 8, 20), True, Verdict.FAIL, False),
    ],
)
def test_superiority_is_told_and_counts_where_required(
    histogram: Any,
    required: bool,
    verdict: Any,
    superior: bool,
    report: Any,
    arm: Any,
    prompts: Any,
) -> None:
    arms = (
        arm("candidate", prompts(histogram), num_draft_tokens=4),
        arm("champion", prompts(), num_draft_tokens=4),
    )
    decision = decide(
        report(*arms), settings=GateSettings(min_speedup=None, require_superiority=required)
    )
    assert decision.superior is superior
    assert decision.verdict is verdict
    assert rule(decision, "superior overall").binding is required


def test_a_better_drafter_that_fails_elsewhere_is_not_called_superior(
    report: Any, arm: Any, prompts: Any
) -> None:
    arms = (
        arm("candidate", prompts((40, 20, 12, 8, 24)), num_draft_tokens=4),
        arm("champion", prompts(), num_draft_tokens=4),
    )
    decision = decide(report(*arms), settings=GateSettings(min_acceptance_length=4.9))
    assert rule(decision, "superior overall").verdict is Verdict.PASS
    assert decision.verdict is Verdict.FAIL and not decision.superior


def test_an_undecided_slice_names_the_prompts_it_needs(
    report: Any, arm: Any, prompts: Any, measurement: Any
) -> None:
    ours = [
        measurement(f"a/{n:02}", histogram=(40 + (27 * n) % 63, 20, 12, 8, 20)) for n in range(8)
    ]
    theirs = [
        measurement(f"a/{n:02}", histogram=(40 + (15 * n) % 69, 20, 12, 8, 20)) for n in range(8)
    ]
    arms = (arm("candidate", ours, num_draft_tokens=4), arm("champion", theirs, num_draft_tokens=4))
    told = rule(decide(report(*arms), settings=GateSettings()), "non-inferior on a")
    assert told.verdict is Verdict.INCONCLUSIVE
    assert told.num_further_prompts is not None and 0 < told.num_further_prompts < 500
    assert f"about {told.num_further_prompts} more prompt" in told.detail
    short = rule(
        decide(report(*arms), settings=GateSettings(max_further_prompts=0)), "non-inferior on a"
    )
    assert "beyond the limit of 0" in short.detail
    assert set(told.p_values) == {"non-inferior", "worse by the margin (Holm)", "better (Holm)"}
    assert told.interval is not None and told.bootstrap_interval is not None


def test_a_short_slice_is_no_pass_however_good(report: Any, arm: Any, prompts: Any) -> None:
    both = prompts() + prompts(num=3, slice_name="b")
    arms = (arm("candidate", both, num_draft_tokens=4), arm("champion", both, num_draft_tokens=4))
    told = rule(decide(report(*arms), settings=GateSettings()), "non-inferior on b")
    assert told.verdict is Verdict.INCONCLUSIVE and "fewer than 8 prompts" in told.detail
    assert told.num_further_prompts == 5


def test_next_to_nothing_accepted_is_a_fail_and_not_a_matter_of_more_prompts(
    report: Any, arm: Any, measurement: Any
) -> None:
    """One lucky draft in eight prompts is all the variance there is: no interval, but no doubt
    either.
    """
    useless = [measurement(f"a/{n}", histogram=(22, int(n == 0), 0)) for n in range(8)]
    told = rule(
        decide(report(arm("candidate", useless, num_draft_tokens=2)), settings=GateSettings()),
        "acceptance length",
    )
    assert told.verdict is Verdict.FAIL and "next to nothing was accepted" in told.detail
    alone = decide(
        report(arm("candidate", useless[:2], num_draft_tokens=2)), settings=GateSettings()
    )
    assert rule(alone, "acceptance length").verdict is Verdict.INCONCLUSIVE


@pytest.fixture
def with_rounds(report: Any, arm: Any, prompts: Any) -> Any:
    """A report whose candidate and no_draft had these tok/s in the rounds at 4 in flight."""

    def make(ours: tuple[float, ...], theirs: tuple[float, ...]) -> Any:
        arms = []
        for name, rates, k in (("candidate", ours, 4), ("no_draft", theirs, 0)):
            one = arm(name, prompts(), num_draft_tokens=k, rates={1: 1.0, 4: 50.0 if k else 40.0})
            points = [point.model_copy(update={"round_tokens_per_s": rates}) for point in one.speed]
            arms.append(one.model_copy(update={"speed": tuple(points)}))
        return report(*arms)

    return make


SPEED = GateSettings(min_speedup=1.2, serving_requests_in_flight=4)


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ((60, 62, 58, 60), (40, 41, 40, 39), Verdict.PASS),
        ((42, 43, 41, 43), (40, 41, 40, 40), Verdict.FAIL),
        ((60, 42), (40, 41), Verdict.INCONCLUSIVE),
        ((50, 51.5), (40, 41), Verdict.INCONCLUSIVE),  # two rounds that agree: t(1) reaches far
        ((80,), (40,), Verdict.INCONCLUSIVE),
        ((), (), Verdict.INCONCLUSIVE),
        ((80, 80, 80), (40, 40), Verdict.INCONCLUSIVE),
        ((80, 80, float("nan")), (40, 40, 40), Verdict.INCONCLUSIVE),
    ],
)
def test_speed_up_is_judged_by_the_interval_over_rounds(
    ours: Any, theirs: Any, verdict: Verdict, with_rounds: Any
) -> None:
    told = rule(decide(with_rounds(ours, theirs), settings=SPEED), "speed-up at 4 in flight")
    assert told.verdict is verdict
    if told.interval is not None:
        assert told.value is not None and told.interval[0] < told.value < told.interval[1]
        assert (told.interval[0] >= 1.2) == (verdict is Verdict.PASS)
        assert (told.interval[1] < 1.2) == (verdict is Verdict.FAIL)


def test_value_and_interval_of_a_speed_up_are_of_the_rounds(with_rounds: Any) -> None:
    """Two rounds of log ratios a and b: mean (a + b) / 2, half-width t(1) |a - b| / 2, at the first
    look's level.
    """
    a, b = math.log(60 / 40), math.log(50 / 41)
    told = rule(decide(with_rounds((60, 50), (40, 41)), settings=SPEED), "speed-up at 4 in flight")
    half = stats.t.ppf(FIRST_LEVEL, 1) * (a - b) / 2
    assert told.value == pytest.approx(math.exp((a + b) / 2))
    assert told.interval == pytest.approx(
        (math.exp((a + b) / 2 - half), math.exp((a + b) / 2 + half))
    )
    assert (
        told.num_further_rounds is not None
        and f"about {told.num_further_rounds} more round" in told.detail
    )
    assert told.num_further_prompts is None


def test_one_round_says_how_many_are_needed_at_least(with_rounds: Any) -> None:
    told = rule(decide(with_rounds((60,), (40,)), settings=SPEED), "speed-up at 4 in flight")
    assert told.value == pytest.approx(1.25) and told.interval is None  # of the medians, 50 and 40
    assert told.num_further_rounds is not None and told.num_further_rounds >= 1
    assert f"one round shows no spread; at least {told.num_further_rounds} more" in told.detail


def test_rounds_are_planned_for_the_level_of_the_next_look(with_rounds: Any) -> None:
    about = with_rounds((60, 50, 52), (40, 41, 40))
    first, third = (
        rule(
            decide(about.model_copy(update={"look": look}), settings=SPEED),
            "speed-up at 4 in flight",
        )
        for look in (1, 3)
    )
    assert first.num_further_rounds is not None and third.num_further_rounds is not None
    assert third.num_further_rounds > first.num_further_rounds


def test_a_round_that_is_not_a_number_fails(with_rounds: Any) -> None:
    told = decide(with_rounds((60, float("nan")), (40, 41)), settings=SPEED).rules[0]
    assert told.verdict is Verdict.FAIL and "candidate.tok/s at 4, round 2" in told.detail


def test_four_equal_prompts_do_not_pass_what_they_are_just_above(
    report: Any, arm: Any, measurement: Any
) -> None:
    """Acceptance length 1.7 each, limit 1.6: no width once, and so a pass."""
    equal = [measurement(f"a/{n}", histogram=(10, 6, 4)) for n in range(4)]
    settings = GateSettings(min_acceptance_length=1.6, min_prompts_per_slice=4)
    told = rule(
        decide(report(arm("candidate", equal, num_draft_tokens=2)), settings=settings),
        "acceptance length",
    )
    assert told.verdict is Verdict.INCONCLUSIVE
    # Log of 0.7 with standard error 1 / (4 sqrt(14)), three degrees of freedom.
    reach = stats.t.ppf(FIRST_LEVEL, 3) / (4 * math.sqrt(14))
    assert told.interval == pytest.approx((1 + 0.7 * math.exp(-reach), 1 + 0.7 * math.exp(reach)))
    assert told.bootstrap_interval is None


def test_identical_arms_are_non_inferior_and_not_superior(
    report: Any, arm: Any, prompts: Any
) -> None:
    arms = (
        arm("candidate", prompts(), num_draft_tokens=4),
        arm("champion", prompts(), num_draft_tokens=4),
    )
    decision = decide(report(*arms), settings=GateSettings(require_superiority=True))
    assert rule(decision, "non-inferior on a").verdict is Verdict.PASS
    told = rule(decision, "superior overall")
    assert told.verdict is Verdict.INCONCLUSIVE and told.p_values["superior"] == pytest.approx(0.5)
    assert told.value == 0 and told.interval is not None and told.interval[0] < 0 < told.interval[1]


def test_prompts_without_a_step_do_not_count_as_prompts(
    report: Any, arm: Any, prompts: Any, measurement: Any
) -> None:
    empty = [
        measurement(f"b/{n:02}", histogram=(0, 0, 0, 0, 0), num_output_tokens=1) for n in range(6)
    ]
    told = rule(
        decide(
            report(arm("candidate", prompts(num=3) + empty, num_draft_tokens=4)),
            settings=GateSettings(),
        ),
        "acceptance length",
    )
    assert told.verdict is Verdict.INCONCLUSIVE and told.num_prompts == 3


def test_a_fail_shows_the_interval_it_rests_on(report: Any, arm: Any, prompts: Any) -> None:
    arms = (
        arm("candidate", prompts((60, 20, 12, 8, 20)), num_draft_tokens=4),
        arm("champion", prompts(), num_draft_tokens=4),
    )
    told = rule(decide(report(*arms), settings=GateSettings()), "non-inferior on a")
    assert told.verdict is Verdict.FAIL and told.confidence == pytest.approx(2 * FIRST_LEVEL - 1)
    assert told.interval is not None and told.interval[1] < -0.05


@pytest.mark.parametrize(
    ("gap", "limit", "verdict"),
    [
        (
            TrainServedGap(teacher_forced=1.5, reference=1.48, served=1.47, num_prompts=9),
            0.05,
            Verdict.PASS,
        ),
        (
            TrainServedGap(
                teacher_forced=1.5, reference=1.48, served=1.2, diverging_position=2, num_prompts=9
            ),
            0.05,
            Verdict.FAIL,
        ),
        (None, 0.05, Verdict.INCONCLUSIVE),
        (None, None, None),
    ],
)
def test_train_served_gap(
    gap: Any, limit: Any, verdict: Any, report: Any, arm: Any, prompts: Any
) -> None:
    about = report(arm("candidate", prompts(), num_draft_tokens=4)).model_copy(
        update={"train_served_gap": gap}
    )
    told = {
        r.rule: r for r in decide(about, settings=GateSettings(max_train_served_gap=limit)).rules
    }
    assert (told["train-served gap"].verdict if "train-served gap" in told else None) is verdict
    if verdict is Verdict.FAIL:
        assert "differ most at draft position 2" in told["train-served gap"].detail


@pytest.mark.parametrize(
    ("ours", "plain", "verdict"),
    [(1100, 1000, Verdict.PASS), (1600, 1000, Verdict.FAIL), (None, 1000, Verdict.INCONCLUSIVE)],
)
def test_memory(
    ours: Any, plain: Any, verdict: Verdict, report: Any, arm: Any, prompts: Any
) -> None:
    arms = [
        arm(name, prompts(), num_draft_tokens=k).model_copy(update={"peak_memory_bytes": size})
        for name, k, size in (("candidate", 4, ours), ("no_draft", 0, plain))
    ]
    told = rule(decide(report(*arms), settings=GateSettings(max_memory_growth=0.2)), "memory")
    assert told.verdict is verdict


def test_further_temperatures_have_rules_of_their_own(report: Any, arm: Any, prompts: Any) -> None:
    arms = {name: arm(name, prompts(), num_draft_tokens=4) for name in ("candidate", "champion")}
    poor = {**arms, "candidate": arm("candidate", prompts((90, 9, 0, 0, 0)), num_draft_tokens=4)}
    settings = GateSettings(min_sampled_acceptance_length=1.2, min_speedup=None)

    def decided(sampled: Any) -> GateDecision:
        further = (TemperatureReport(temperature=1.0, arms=sampled),)
        about = report(*arms.values()).model_copy(update={"further_temperatures": further})
        return decide(about, settings=settings)

    assert decided(arms).verdict is Verdict.PASS
    told = decided(poor)
    assert rule(told, "acceptance length at temperature 1").verdict is Verdict.FAIL
    assert rule(told, "non-inferior at temperature 1").verdict is Verdict.FAIL
    # Two sampled prompts were "non-inferior" once: they agreed, and no spread was no doubt.
    few = {name: arm(name, prompts(num=2), num_draft_tokens=4) for name in arms}
    for name in ("non-inferior at temperature 1", "acceptance length at temperature 1"):
        undecided = rule(decided(few), name)
        assert (
            undecided.verdict is Verdict.INCONCLUSIVE and "fewer than 8 prompts" in undecided.detail
        )


def test_nan_at_a_further_temperature_fails(report: Any, arm: Any, prompts: Any) -> None:
    candidate = arm("candidate", prompts(), num_draft_tokens=4)
    broken = candidate.model_copy(update={"draft_coverage": float("nan")})
    further = (TemperatureReport(temperature=1.0, arms={"candidate": broken}),)
    decision = decide(
        report(candidate).model_copy(update={"further_temperatures": further}),
        settings=GateSettings(),
    )
    assert (
        decision.verdict is Verdict.FAIL
        and "candidate at 1.draft_coverage" in decision.rules[0].detail
    )
