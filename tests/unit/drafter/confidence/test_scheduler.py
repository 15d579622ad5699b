"""The best threshold against brute force and known optima; the scheduler stops at the first prefix
too unlikely.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, logit

from components.contracts import Calibration
from components.drafter.confidence.calibration import COST_RATIOS, fit_calibration
from components.drafter.confidence.scheduler import PrefixScheduler
from components.drafter.confidence.thresholds import best_threshold
from components.errors import ConfigError


def rate(
    survival_NK: np.ndarray, accepted_NK: np.ndarray, cost_ratio: float, threshold: float
) -> float:
    """Tokens per unit cost, block by block."""
    tokens, costs = 0.0, 0.0
    for survivals, accepted in zip(survival_NK, accepted_NK, strict=True):
        scheduled = int((survivals >= threshold).sum())
        correct = 0
        while correct < scheduled and accepted[correct]:
            correct += 1
        tokens = tokens + 1 + correct
        costs = costs + 1 + cost_ratio * scheduled
    return tokens / costs


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 4), st.floats(0, 2), st.booleans()
)
def test_no_threshold_beats_the_best(
    seed: int, num_blocks: int, k: int, cost_ratio: float, with_ties: bool
) -> None:
    draws = np.random.default_rng(seed)
    scores_NK = draws.random((num_blocks, k))
    survival_NK = (scores_NK.round(1) if with_ties else scores_NK).cumprod(1)
    accepted_NK = draws.random(survival_NK.shape) < 0.5
    best = best_threshold(survival_NK, accepted_NK, cost_ratio)
    assert rate(survival_NK, accepted_NK, cost_ratio, best.threshold) == pytest.approx(
        best.tokens_per_cost
    )
    for threshold in (*np.unique(survival_NK), 0.0, 1.1):
        assert rate(survival_NK, accepted_NK, cost_ratio, threshold) <= best.tokens_per_cost + 1e-12
    assert best.num_scheduled == pytest.approx((survival_NK >= best.threshold).sum() / num_blocks)


def test_a_known_optimum() -> None:
    """Two kinds of blocks: sure drafts that are always accepted, hopeless ones that never are."""
    survival_NK = np.array([[0.9, 0.8]] * 3 + [[0.2, 0.1]] * 5)
    accepted_NK = np.array([[True, True]] * 3 + [[False, False]] * 5)
    best = best_threshold(survival_NK, accepted_NK, 0.25)
    assert 0.2 < best.threshold < 0.8
    assert best.num_scheduled == pytest.approx(6 / 8) and best.tokens_per_step == pytest.approx(
        14 / 8
    )
    assert best.tokens_per_cost == pytest.approx((8 + 6) / (8 + 0.25 * 6))


def test_free_drafts_are_all_scheduled_and_dear_ones_never() -> None:
    survival_NK = np.array([[0.9, 0.5], [0.7, 0.1]])
    accepted_NK = np.ones((2, 2), bool)
    free = best_threshold(survival_NK, accepted_NK, 0.0)
    assert free.num_scheduled == 2 and free.threshold < 0.1
    dear = best_threshold(survival_NK, accepted_NK, 5.0)
    assert dear.num_scheduled == 0 and dear.tokens_per_cost == 1.0 and dear.threshold > 0.9
    sure = best_threshold(np.ones((2, 2)), accepted_NK, 5.0)
    assert sure.num_scheduled == 0 and sure.threshold > 1.0
    assert PrefixScheduler(sure.threshold).num_scheduled(np.full((1, 2), 100.0)).tolist() == [0]


def test_with_right_scores_the_threshold_is_price_times_rate() -> None:
    """Dinkelbach's condition at the optimum of a quotient."""
    draws = np.random.default_rng(1)
    logits_NK = draws.normal(0, 1.5, (40_000, 4))
    accepted_NK = draws.random(logits_NK.shape) < expit(logits_NK)
    for cost_ratio in (0.05, 0.2, 0.5):
        best = best_threshold(expit(logits_NK).cumprod(1), accepted_NK, cost_ratio)
        assert best.threshold == pytest.approx(cost_ratio * best.tokens_per_cost, abs=0.04)


def test_slots_that_are_not_valid_are_neither_paid_nor_won() -> None:
    survival_NK = np.array([[0.9, 0.8], [0.9, 0.8]])
    accepted_NK = np.ones((2, 2), bool)
    valid_NK = np.array([[True, True], [True, False]])
    best = best_threshold(survival_NK, accepted_NK, 0.1, valid_NK=valid_NK)
    assert best.num_scheduled == 1.5 and best.tokens_per_step == 2.5


def test_prices_and_shapes_are_checked() -> None:
    with pytest.raises(ConfigError, match="price of a draft token"):
        best_threshold(np.ones((1, 1)), np.ones((1, 1)), -0.1)
    with pytest.raises(ConfigError, match="do not belong together"):
        best_threshold(np.ones((1, 2)), np.ones((1, 1)), 0.1)


def test_the_scheduler_stops_at_the_first_prefix_too_unlikely() -> None:
    logits_NK = logit(
        np.array([[0.9, 0.9, 0.9], [0.9, 0.5, 0.99], [0.4, 0.99, 0.99], [0.99, 0.99, 0.99]])
    )
    # Survivals .9 .81 .73; .9 .45; .4; .99 .98 .97.
    found_N = PrefixScheduler(0.5).num_scheduled(logits_NK)
    assert found_N.tolist() == [3, 1, 0, 3] and np.issubdtype(found_N.dtype, np.integer)
    assert PrefixScheduler(0.0).num_scheduled(logits_NK).tolist() == [3] * 4
    assert PrefixScheduler(1.01).num_scheduled(logits_NK).tolist() == [0] * 4
    for threshold in (-0.1, float("nan")):
        with pytest.raises(ConfigError, match="probability"):
            PrefixScheduler(threshold)


@pytest.fixture(scope="module")
def calibrated() -> Calibration:
    draws = np.random.default_rng(3)
    logits_NK = draws.normal(0, 1.5, (4000, 2))
    accepted_NK = draws.random(logits_NK.shape) < expit(logits_NK)
    return fit_calibration(4 * logits_NK, accepted_NK, np.arange(4000) // 40)


def test_the_scheduler_uses_calibrated_scores(calibrated: Calibration) -> None:
    logits_NK = np.array([[4.0, 4.0]])  # raw 0.98 and 0.96; at temperature 4, 0.73 and 0.53
    assert PrefixScheduler(0.6).num_scheduled(logits_NK).tolist() == [2]
    assert PrefixScheduler(0.6, calibrated).num_scheduled(logits_NK).tolist() == [1]


def test_thresholds_rise_with_the_price_and_are_interpolated(calibrated: Calibration) -> None:
    assert tuple(choice.cost_ratio for choice in calibrated.thresholds) == COST_RATIOS
    thresholds = [choice.threshold for choice in calibrated.thresholds]
    assert thresholds[0] < thresholds[4] < thresholds[-1]
    at = {choice.cost_ratio: choice.threshold for choice in calibrated.thresholds}
    assert PrefixScheduler.for_cost_ratio(calibrated, 0.1).threshold == at[0.1]
    assert PrefixScheduler.for_cost_ratio(calibrated, 0.125).threshold == pytest.approx(
        (at[0.1] + at[0.15]) / 2
    )
    with pytest.raises(ConfigError, match="no threshold for this cost ratio"):
        PrefixScheduler.for_cost_ratio(calibrated, 3.0)
