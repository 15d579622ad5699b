"""Speed-up over rounds: exact for two, never certain, and more rounds decide more often."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from components.contracts import Verdict
from components.evaluation.rounds import MIN_ROUND_SPREAD, estimate_speedup, rounds_needed
from components.evaluation.statistics.estimate import threshold_verdict


def test_two_rounds_give_students_t_of_two() -> None:
    a, b = math.log(1.5), math.log(1.1)
    estimate = estimate_speedup([75, 44], [50, 40])
    assert estimate is not None
    half = stats.t.ppf(0.975, 1) * abs(a - b) / 2
    assert estimate.log_value == pytest.approx((a + b) / 2)
    assert estimate.interval() == pytest.approx(
        (math.exp((a + b) / 2 - half), math.exp((a + b) / 2 + half))
    )


def test_arms_changed_about_give_the_reciprocal() -> None:
    ours, theirs = [60.0, 66.0, 55.0], [40.0, 41.0, 45.0]
    one, other = estimate_speedup(ours, theirs), estimate_speedup(theirs, ours)
    assert one is not None and other is not None
    assert one.value * other.value == pytest.approx(1)
    assert one.interval()[0] * other.interval()[1] == pytest.approx(1)


def test_what_slows_both_arms_of_a_round_leaves_the_interval_alone() -> None:
    machine = [1.0, 0.4, 0.9, 0.7]
    ratios = [1.5, 1.4, 1.45, 1.6]
    quiet = estimate_speedup([40 * r for r in ratios], [40.0] * 4)
    loaded = estimate_speedup(
        [40 * r * m for r, m in zip(ratios, machine, strict=True)], [40 * m for m in machine]
    )
    assert quiet is not None and loaded is not None
    assert loaded.interval() == pytest.approx(quiet.interval())


def test_rounds_that_agree_are_no_certainty() -> None:
    estimate = estimate_speedup([60, 60, 60, 60], [40, 40, 40, 40])
    assert estimate is not None and estimate.standard_error == pytest.approx(MIN_ROUND_SPREAD / 2)
    two = estimate_speedup([60, 60], [40, 40])
    assert threshold_verdict(two, 1.3, alpha=0.025) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([], []),
        ([60.0], [40.0]),
        ([60.0, 60.0], [40.0]),
        ([60.0, 0.0], [40.0, 40.0]),
        ([60.0, math.nan], [40.0, 40.0]),
    ],
)
def test_what_are_no_rounds_in_turns_says_nothing(ours: list[float], theirs: list[float]) -> None:
    assert estimate_speedup(ours, theirs) is None
    assert (
        threshold_verdict(estimate_speedup(ours, theirs), 0.5, alpha=0.025) is Verdict.INCONCLUSIVE
    )


def test_more_rounds_pass_more_often_above_the_limit_and_not_at_it() -> None:
    """Noise of 8 % per arm and round, limit 1.2, 1,500 measurements each."""
    generator = np.random.default_rng(3)
    passes: dict[float, list[float]] = {}
    for truth in (1.3, 1.2):
        for num_rounds in (2, 6, 12):
            noise = np.exp(generator.normal(0, 0.08, (1500, 2, num_rounds)))
            won = [
                threshold_verdict(estimate_speedup(list(truth * a), list(b)), 1.2, alpha=0.025)
                is Verdict.PASS
                for a, b in noise
            ]
            passes.setdefault(truth, []).append(float(np.mean(won)))
    assert passes[1.3][0] < passes[1.3][1] - 0.1 and passes[1.3][1] < passes[1.3][2] - 0.1
    assert max(passes[1.2]) <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / 1500)


def test_the_rounds_named_decide_as_often_as_promised() -> None:
    """Spread as observed in the rounds, true speed-up as observed: four of five measurements of
    that size decide.
    """
    logs = math.log(1.3) + np.array([0.1, -0.1, 0.1, -0.1])
    spread = float(np.std(logs, ddof=1))
    needed = rounds_needed(list(np.exp(logs)), [1.0] * 4, 1.2, alpha=0.025)
    assert needed is not None and needed > 4
    draws = np.random.default_rng(4).normal(math.log(1.3), spread, (4000, needed))
    t = (draws.mean(1) - math.log(1.2)) / (draws.std(1, ddof=1) / math.sqrt(needed))
    assert 0.78 < np.mean(t >= stats.t.ppf(0.975, needed - 1)) < 0.84


def test_one_round_names_the_least() -> None:
    least = rounds_needed([60.0], [40.0], 1.2, alpha=0.025)
    assert least is not None and 2 <= least < 6
    assert rounds_needed([], [], 1.2, alpha=0.025) is None
    # Exactly at the limit.
    assert rounds_needed([48.0, 48.0], [40.0, 40.0], 1.2, alpha=0.025) is None
