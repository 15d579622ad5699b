"""Estimates, intervals, corrections and sample sizes on data whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from components.contracts import Verdict
from components.evaluation.statistics.bootstrap import (
    bootstrap_ratio,
    bootstrap_relative_difference,
)
from components.evaluation.statistics.power import power, prompts_needed
from components.evaluation.statistics.ratios import (
    Estimate,
    estimate_ratio,
    estimate_relative_difference,
    holm,
    non_inferiority_verdicts,
    ratio_of_sums,
    relative_difference,
    threshold_verdict,
)


def estimate_at(
    value: float, standard_error: float, *, origin: float = -1.0, num: int = 20
) -> Estimate:
    return Estimate(value, origin, math.log(value - origin), standard_error, num - 1.0, num)


def test_ratio_of_sums_weighs_prompts_by_their_steps() -> None:
    assert ratio_of_sums(np.array([2.0, 90.0]), np.array([1.0, 30.0])) == 92 / 31
    assert math.isnan(ratio_of_sums(np.zeros(2), np.zeros(2)))


def test_prompts_that_agree_are_no_certainty() -> None:
    """n prompts of c accepted drafts each: one more is off by sqrt(c), so the standard error is 1 /
    (n sqrt(c)).
    """
    for num in (4, 16):
        steps = np.full(num, 20.0)
        estimate = estimate_ratio(steps * 1.7, steps, origin=1.0)
        assert estimate is not None and estimate.standard_error == pytest.approx(
            1 / (num * math.sqrt(14))
        )
        assert estimate.degrees_of_freedom == num - 1
        reach = stats.t.ppf(0.975, num - 1) / (num * math.sqrt(14))
        assert estimate.interval() == pytest.approx(
            (1 + 0.7 * math.exp(-reach), 1 + 0.7 * math.exp(reach))
        )
        assert bootstrap_ratio(steps * 1.7, steps, num_samples=200, seed=0) is None


def test_a_perfect_drafter_has_an_interval_of_some_width() -> None:
    steps = np.array([10.0, 20.0, 5.0])
    estimate = estimate_ratio(steps * 5, steps, origin=1.0)
    # 140 drafts, 46.7 a prompt.
    assert estimate is not None and estimate.standard_error == pytest.approx(
        math.sqrt(140 / 3) / 140
    )
    assert estimate.value == 5.0 and estimate.interval()[0] < 4.5
    assert bootstrap_ratio(steps * 5, steps, num_samples=200, seed=0) is None


def test_a_useless_drafter_is_judged_as_a_count_of_zero() -> None:
    """None of 35 steps accepted a draft: at 0.2 per step that has a chance of exp(-7)."""
    steps = np.array([10.0, 20.0, 5.0])
    estimate = estimate_ratio(steps, steps, origin=1.0)
    assert estimate is not None and estimate.value == 1.0
    assert estimate.p_below(1.2) == pytest.approx(math.exp(-7))
    assert estimate.interval() == pytest.approx((1.0, 1 - math.log(0.025) / 35))
    assert estimate.p_below(estimate.interval()[1]) == pytest.approx(0.025)
    assert threshold_verdict(estimate, 1.2, alpha=0.025) is Verdict.FAIL
    assert threshold_verdict(estimate, 1.05, alpha=0.025) is Verdict.INCONCLUSIVE
    # exp(-0.05 * 35 * N / 3) <= 0.025 from N = 6.3 on.
    assert prompts_needed(estimate, 1.05, alpha=0.025) == 7


def test_each_slice_is_taken_as_if_one_prompt_more_had_been_seen() -> None:
    """Two slices that agree within themselves: (14 + 7) / C^2 with C = 4 * 14 + 4 * 7."""
    steps = np.full(8, 20.0)
    accepted = np.array([14.0] * 4 + [7.0] * 4)
    estimate = estimate_ratio(steps + accepted, steps, origin=1.0, strata=list("aaaabbbb"))
    assert estimate is not None and estimate.standard_error == pytest.approx(math.sqrt(21) / 84)


def test_what_both_arms_accept_says_nothing_of_their_difference() -> None:
    """Identical arms differ by one draft of a further prompt at the least: standard error 1 /
    tokens.
    """
    steps, tokens = np.full(8, 20.0), np.full(8, 34.0)
    same = estimate_relative_difference(tokens, steps, tokens, steps)
    assert (
        same is not None and same.value == 0 and same.standard_error == pytest.approx(1 / (8 * 34))
    )
    assert same.p_above(0.0) == pytest.approx(0.5)
    # Each prompt two drafts more: |a - b| is 2, on the scale of 36 and 34 tokens each.
    more = estimate_relative_difference(tokens + 2, steps, tokens, steps)
    assert more is not None and more.standard_error == pytest.approx(
        math.sqrt(2 / (8 * 36 * 8 * 34))
    )


def test_counting_noise_vanishes_against_a_real_spread() -> None:
    generator = np.random.default_rng(9)
    for num, most in ((8, 1.2), (64, 1.02)):
        steps = np.full(num, 40.0)
        accepted = 20 + 10 * (np.arange(num) % 2) + generator.integers(-3, 4, num)
        estimate = estimate_ratio(steps + accepted, steps, origin=1.0)
        assert estimate is not None
        assert 1 < estimate.standard_error / (stats.sem(accepted) / accepted.mean()) < most


def test_no_estimate_is_without_doubt() -> None:
    with pytest.raises(ValueError, match="no measurement is certain"):
        Estimate(1.5, 1.0, math.log(0.5), 0.0, 5.0, 6)
    with pytest.raises(ValueError, match="trials"):
        Estimate(1.0, 1.0, -math.inf, 0.0, 5.0, 6)


@pytest.mark.parametrize("steps", [[], [8.0], [8.0, 0.0]])
def test_fewer_than_two_prompts_say_nothing(steps: list[float]) -> None:
    den = np.array(steps)
    assert estimate_ratio(den * 2, den, origin=1.0) is None
    assert estimate_relative_difference(den * 2, den, den * 2, den) is None
    assert bootstrap_ratio(den * 2, den, num_samples=200, seed=0) is None


def test_equal_prompts_give_students_t_of_the_mean() -> None:
    """With equal steps a ratio of sums is a mean: the interval is the textbook one, on the log
    scale.
    """
    generator = np.random.default_rng(0)
    gains = generator.normal(0.5, 0.05, 12)  # light tails: kurtosis takes no degree of freedom away
    steps = np.full(12, 10.0)
    estimate = estimate_ratio(steps * (1 + gains), steps, origin=1.0)
    assert estimate is not None
    counted = 10 * gains
    noise = counted.mean() / counted.sum() ** 2  # one further prompt's
    sampled = (stats.sem(gains) / gains.mean()) ** 2
    assert estimate.standard_error == pytest.approx(math.sqrt(sampled + noise), rel=1e-9)
    assert 9 < estimate.degrees_of_freedom <= 11
    reach = stats.t.ppf(0.975, estimate.degrees_of_freedom) * estimate.standard_error
    assert estimate.interval()[0] == pytest.approx(1 + gains.mean() * math.exp(-reach))
    damped = min(1.0, 1 + stats.kurtosis(gains) / 2)
    skewness = max(0.0, stats.skew(gains, bias=False)) / math.sqrt(12) * damped
    skewness *= (sampled / (sampled + noise)) ** 1.5
    further = skewness * (2 * 1.959964**2 + 1) / 6 * estimate.standard_error
    assert estimate.interval()[1] == pytest.approx(1 + gains.mean() * math.exp(reach + further))


def test_tests_agree_with_the_ends_of_the_interval() -> None:
    """A threshold at either end of a 95 % interval has a one-sided p of 2.5 %, skewed or not."""
    steps = np.full(10, 30.0)
    gains = np.array([0.2, 0.2, 0.25, 0.3, 0.2, 0.22, 0.9, 0.3, 0.25, 0.2])
    skewed = estimate_ratio(steps * (1 + gains), steps, origin=1.0)
    assert skewed is not None and skewed.skewness > 0
    for estimate in (skewed, estimate_at(0.1, 0.05)):
        low, high = estimate.interval(0.95)
        assert estimate.p_above(low) == pytest.approx(0.025)
        assert estimate.p_below(high) == pytest.approx(0.025)
        assert estimate.p_below(estimate.value) >= 0.5


def test_standard_error_agrees_with_the_jackknife() -> None:
    """The deviations are leave-one-out changes of the log ratio; a jackknife that recomputes it
    agrees.
    """
    generator = np.random.default_rng(1)
    den = generator.integers(20, 60, 40).astype(float)
    num = den * (1 + generator.gamma(4, 0.1, 40))
    left_out = [
        math.log((num.sum() - a) / (den.sum() - b) - 1) for a, b in zip(num, den, strict=True)
    ]
    jackknife = math.sqrt(39 / 40 * np.sum((left_out - np.mean(left_out)) ** 2))
    estimate = estimate_ratio(num, den, origin=1.0)
    assert estimate is not None and estimate.standard_error == pytest.approx(jackknife, rel=0.02)


def test_strata_take_out_the_spread_between_slices() -> None:
    generator = np.random.default_rng(2)
    steps = np.full(24, 30.0)
    gains = np.where(np.arange(24) < 12, 0.2, 1.2) + generator.normal(0, 0.02, 24)
    names = ["easy" if index < 12 else "hard" for index in range(24)]
    pooled = estimate_ratio(steps * (1 + gains), steps, origin=1.0)
    by_slice = estimate_ratio(steps * (1 + gains), steps, origin=1.0, strata=names)
    assert pooled is not None and by_slice is not None
    assert by_slice.value == pooled.value
    assert by_slice.standard_error < pooled.standard_error / 10
    assert by_slice.degrees_of_freedom <= 22


def test_slices_of_one_prompt_are_put_together() -> None:
    steps = np.full(6, 10.0)
    gains = np.array([0.5, 0.6, 0.4, 0.5, 0.9, 0.1])
    told = [
        estimate_ratio(steps * (1 + gains), steps, origin=1.0, strata=list(names))
        for names in ("aaaabc", "aaaabb", "aaaaab", "aaaaaa")
    ]
    assert all(one is not None for one in told)
    assert told[0] == told[1] and told[2] == told[3]


def test_a_few_prompts_that_carry_all_the_variance_count_as_few() -> None:
    steps = np.full(30, 40.0)
    even = np.tile([0.4, 0.6], 15)
    heavy = np.full(30, 0.5)
    heavy[0] = 2.0
    spread = estimate_ratio(steps * (1 + even), steps, origin=1.0)
    one = estimate_ratio(steps * (1 + heavy), steps, origin=1.0)
    assert spread is not None and one is not None
    assert spread.degrees_of_freedom == 29 and one.degrees_of_freedom < 3


def test_bootstrap_agrees_with_scipy_bca_where_prompts_are_many() -> None:
    """scipy.stats.bootstrap resamples a statistic of paired samples; with many prompts the
    expansion is nothing.
    """
    generator = np.random.default_rng(3)
    den = generator.integers(10, 60, 400).astype(float)
    num = den * generator.gamma(8, 0.2, 400)
    ours = bootstrap_ratio(num, den, num_samples=10_000, seed=1)
    theirs = stats.bootstrap(
        (num, den), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, vectorized=True,
        n_resamples=10_000, method="BCa", rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    assert ours is not None
    width = theirs.high - theirs.low
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.03 * width)


def test_bootstrap_is_reproducible_and_as_wide_as_the_jackknife() -> None:
    generator = np.random.default_rng(4)
    den = generator.integers(20, 60, 12).astype(float)
    num = den * (1 + generator.gamma(4, 0.1, 12))
    first, again = (bootstrap_ratio(num, den, num_samples=2000, seed=7) for _ in range(2))
    estimate = estimate_ratio(num, den, origin=1.0)
    assert first is not None and first == again and estimate is not None
    low, high = estimate.interval()
    assert 0.75 < (first[1] - first[0]) / (high - low) < 1.3


def test_pairing_takes_out_the_difficulty_of_prompts() -> None:
    """The same relative loss on every prompt: what is left is counting noise, whatever the prompts'
    spread.
    """
    generator = np.random.default_rng(5)
    steps = generator.integers(10, 50, 30).astype(float)
    champion = steps * generator.uniform(1.1, 4.0, 30)
    arms = (champion * 0.9, steps, champion, steps)
    estimate = estimate_relative_difference(*arms)
    assert estimate is not None
    apart = 0.1 * champion
    assert estimate.standard_error == pytest.approx(
        math.sqrt(apart.mean() / (0.9 * champion.sum() ** 2))
    )
    assert estimate.interval() == pytest.approx((-0.1, -0.1), abs=0.005)
    assert relative_difference(*arms) == pytest.approx(-0.1)
    assert bootstrap_relative_difference(*arms, num_samples=500, seed=0) is None


def test_paired_difference_ignores_which_arm_comes_first() -> None:
    generator = np.random.default_rng(6)
    a, b, c, d = (generator.integers(20, 60, 15).astype(float) for _ in range(4))
    ours, theirs = (
        estimate_relative_difference(a, b, c, d),
        estimate_relative_difference(c, d, a, b),
    )
    assert ours is not None and theirs is not None
    assert (1 + ours.value) * (1 + theirs.value) == pytest.approx(1)
    assert ours.standard_error == pytest.approx(theirs.standard_error)


@pytest.mark.parametrize(
    ("threshold", "verdict"),
    [(1.2, Verdict.PASS), (1.45, Verdict.INCONCLUSIVE), (2.0, Verdict.FAIL)],
)
def test_threshold_verdict_is_where_the_interval_lies(threshold: float, verdict: Verdict) -> None:
    estimate = estimate_at(1.5, 0.1, origin=1.0)
    low, high = estimate.interval(0.95)
    assert threshold_verdict(estimate, threshold, alpha=0.025) is verdict
    assert (verdict is Verdict.PASS) == (low >= threshold) and (verdict is Verdict.FAIL) == (
        high < threshold
    )


def test_without_an_estimate_nothing_is_decided() -> None:
    assert threshold_verdict(None, 1.2, alpha=0.025) is Verdict.INCONCLUSIVE
    broken = Estimate(math.nan, 1.0, math.nan, 0.1, 5, 6)
    assert threshold_verdict(broken, 1.2, alpha=0.025) is Verdict.INCONCLUSIVE


def test_holm_steps_down_from_the_smallest() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06}
    )
    assert holm({"a": 0.9, "b": 0.8}) == pytest.approx({"a": 1.0, "b": 1.0})
    assert holm({}) == {}


def test_a_skewed_difference_goes_further_on_its_long_side() -> None:
    """Few prompts lose much: the lower end of the difference lies further out; mirrored, the upper
    one does.
    """
    steps = np.full(12, 40.0)
    champion = steps * 1.5
    losses = np.array([0.0, 0.01, 0.0, 0.01, 0.0, 0.01, 0.0, 0.01, 0.0, 0.01, 0.02, 0.2])
    down = estimate_relative_difference(champion * (1 - losses), steps, champion, steps)
    up = estimate_relative_difference(champion, steps, champion * (1 - losses), steps)
    assert down is not None and up is not None and down.skewness < 0 < up.skewness
    reaches = [
        (
            one.log_value - math.log1p(one.interval()[0]),
            math.log1p(one.interval()[1]) - one.log_value,
        )
        for one in (down, up)
    ]
    assert reaches[0][0] > 1.1 * reaches[0][1]
    assert reaches[0] == pytest.approx(reaches[1][::-1], rel=0.05)


def test_passes_are_not_corrected_and_fails_are() -> None:
    """A slice passes at its own level; a fail must stand against the number of slices it was chosen
    from.
    """
    just = estimate_at(-0.13, 0.04)  # p 0.013 of being below -5 %
    others = {f"s{n}": estimate_at(0.0, 0.012) for n in range(4)}

    def verdict(slices: dict[str, Estimate | None]) -> Verdict:
        return non_inferiority_verdicts(slices, 0.05, alpha_pass=0.01, alpha_fail=0.025)["just"]

    assert verdict({"just": just}) is Verdict.FAIL
    assert verdict({"just": just, **others}) is Verdict.INCONCLUSIVE
    told = non_inferiority_verdicts(
        {**others, "one": None}, 0.05, alpha_pass=0.01, alpha_fail=0.025
    )
    assert (
        set(told.values()) == {Verdict.PASS, Verdict.INCONCLUSIVE}
        and told["one"] is Verdict.INCONCLUSIVE
    )


def test_the_number_of_prompts_named_decides_as_often_as_promised() -> None:
    """2,000 simulated measurements of that size, true value as observed: 80 % are decided, on the
    right side.
    """
    generator = np.random.default_rng(8)
    estimate = estimate_at(0.0, 0.04, num=16)  # one prompt spreads by 0.16
    needed = prompts_needed(estimate, -0.05, alpha=0.025)
    assert needed is not None and needed > 16
    draws = generator.normal(0.0, 0.16, (2000, needed))
    t = (draws.mean(1) - math.log(0.95)) / (draws.std(1, ddof=1) / math.sqrt(needed))
    decided = np.mean(t >= stats.t.ppf(0.975, needed - 1))
    assert 0.77 < decided < 0.84
    assert power(estimate, -0.05, num_prompts=needed, alpha=0.025) >= 0.8
    assert power(estimate, -0.05, num_prompts=needed - 1, alpha=0.025) < 0.8


def test_no_number_of_prompts_where_none_would_do() -> None:
    assert prompts_needed(None, 0.0, alpha=0.025) is None
    assert prompts_needed(estimate_at(0.0, 0.1), 0.0, alpha=0.025) is None
    assert prompts_needed(estimate_at(0.5, 1e-6), 0.0, alpha=0.025) == 20
