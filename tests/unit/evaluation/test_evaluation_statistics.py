"""Intervals on data whose answer is known, and the three verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from components.contracts import Verdict
from components.evaluation.statistics import (
    non_inferiority_verdict,
    paired_difference_interval,
    ratio_interval,
    ratio_of_sums,
    relative_difference,
    threshold_verdict,
)


def test_ratio_of_sums_weighs_prompts_by_their_steps() -> None:
    assert ratio_of_sums(np.array([2.0, 90.0]), np.array([1.0, 30.0])) == 92 / 31
    assert math.isnan(ratio_of_sums(np.zeros(2), np.zeros(2)))


def test_a_perfect_drafter_has_an_interval_of_no_width() -> None:
    steps = np.array([10.0, 20.0, 5.0])
    assert ratio_interval(steps * 5, steps, num_samples=200, seed=0) == (5.0, 5.0)


@pytest.mark.parametrize("steps", [[], [8.0], [8.0, 0.0]])
def test_fewer_than_two_prompts_say_nothing(steps: list[float]) -> None:
    assert ratio_interval(np.array(steps) * 2, np.array(steps), num_samples=200, seed=0) is None


def test_interval_agrees_with_scipy_bca() -> None:
    """scipy.stats.bootstrap resamples a statistic of paired samples; with many resamples both ends agree."""
    generator = np.random.default_rng(3)
    den = generator.integers(10, 60, 40).astype(float)
    num = den * generator.gamma(8, 0.2, 40)
    ours = ratio_interval(num, den, num_samples=20_000, seed=1)
    theirs = stats.bootstrap(
        (num, den), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, vectorized=True,
        n_resamples=20_000, method="BCa", rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    assert ours is not None
    width = theirs.high - theirs.low
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.03 * width)


def test_interval_is_reproducible() -> None:
    num, den = np.array([3.0, 9.0, 4.0, 8.0]), np.array([2.0, 4.0, 3.0, 4.0])
    assert ratio_interval(num, den, num_samples=500, seed=7) == ratio_interval(num, den, num_samples=500, seed=7)


def test_coverage_of_the_interval_on_skewed_prompts() -> None:
    """400 simulated gates of 60 prompts each: the true ratio lies in the 95 % interval about 95 % of the time."""
    generator = np.random.default_rng(0)
    true_ratio, hits = 1.5, 0
    for trial in range(400):
        den = generator.integers(20, 60, 60).astype(float)
        num = den * (1 + generator.exponential(true_ratio - 1, 60))
        interval = ratio_interval(num, den, num_samples=400, seed=trial)
        assert interval is not None
        hits += interval[0] <= true_ratio <= interval[1]
    assert 0.92 <= hits / 400 <= 0.98


def test_pairing_takes_out_the_difficulty_of_prompts() -> None:
    """The same relative loss on every prompt: the paired interval is a point, whatever the prompts' spread."""
    generator = np.random.default_rng(5)
    steps = generator.integers(10, 50, 30).astype(float)
    champion = steps * generator.uniform(1.1, 4.0, 30)
    interval = paired_difference_interval(champion * 0.9, steps, champion, steps, num_samples=500, seed=0)
    assert interval == pytest.approx((-0.1, -0.1))
    assert relative_difference(champion * 0.9, steps, champion, steps) == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((1.2, 1.4), Verdict.PASS),
        ((1.1, 1.19), Verdict.FAIL),
        ((1.1, 1.3), Verdict.INCONCLUSIVE),
        (None, Verdict.INCONCLUSIVE),
        ((math.nan, 2.0), Verdict.INCONCLUSIVE),
    ],
)
def test_threshold_verdict(interval: tuple[float, float] | None, verdict: Verdict) -> None:
    assert threshold_verdict(interval, 1.2) is verdict


def test_non_inferiority_verdict() -> None:
    assert non_inferiority_verdict((-0.04, 0.1), 0.05) is Verdict.PASS
    assert non_inferiority_verdict((-0.06, 0.1), 0.05) is Verdict.INCONCLUSIVE
    assert non_inferiority_verdict((-0.2, -0.06), 0.05) is Verdict.FAIL
