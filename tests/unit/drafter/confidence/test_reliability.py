"""ECE, its floor, Brier score and AUC against cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.drafter.confidence.reliability import (
    auc,
    brier_score,
    expected_calibration_error,
    expected_floor,
    reliability_figures,
)
from components.errors import TrainingError

SCORES = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60)


def test_ece_by_hand() -> None:
    # Two bins of two: scores 0.1, 0.3 with one positive (0.5 - 0.2), scores 0.6, 0.8 with two (1.0
    # - 0.7).
    assert expected_calibration_error(
        [0.1, 0.8, 0.3, 0.6], [1, 1, 0, 1], num_bins=2
    ) == pytest.approx(0.3)
    # Bins of unequal error weigh by their size: |0 - 0.2| and |1 - 0.9|, two scores each.
    assert expected_calibration_error(
        [0.2, 0.2, 0.9, 0.9], [0, 0, 1, 1], num_bins=2
    ) == pytest.approx(0.15)


def test_equal_scores_share_a_bin_in_any_order() -> None:
    scores = [0.5] * 8
    outcomes = [1, 1, 1, 1, 0, 0, 0, 0]
    assert expected_calibration_error(scores, outcomes, num_bins=4) == 0.0
    assert len(reliability_figures(scores, outcomes, num_bins=4).bins) == 1


def test_brier_by_hand() -> None:
    assert brier_score([0.5, 1.0, 0.2], [1, 1, 0]) == pytest.approx((0.25 + 0.0 + 0.04) / 3)


def test_auc_counts_ties_one_half() -> None:
    assert auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == pytest.approx(0.75)
    assert auc([0.3, 0.3, 0.3, 0.9], [1, 0, 0, 1]) == pytest.approx((0.5 + 0.5 + 1 + 1) / 4)
    assert auc([0.2, 0.2], [1, 0]) == 0.5
    assert auc([0.2, 0.4], [1, 1]) is None


@given(SCORES)
def test_auc_is_the_share_of_pairs_in_order(drawn: list[tuple[float, bool]]) -> None:
    positives, negatives = (
        [score for score, outcome in drawn if outcome is kind] for kind in (True, False)
    )
    found = auc([score for score, _ in drawn], [outcome for _, outcome in drawn])
    if not positives or not negatives:
        assert found is None
        return
    pairs = [1.0 if p > n else 0.5 if p == n else 0.0 for p in positives for n in negatives]
    assert found == pytest.approx(np.mean(pairs))


@given(SCORES, st.integers(1, 20), st.randoms())
def test_figures_stay_in_range_and_do_not_depend_on_order(
    drawn: list[tuple[float, bool]], num_bins: int, shuffler: object
) -> None:
    scores, outcomes = np.array([s for s, _ in drawn]), np.array([o for _, o in drawn])
    figures = reliability_figures(scores, outcomes, num_bins=num_bins)
    assert 0 <= figures.ece <= 1 and 0 <= figures.brier <= 1 and figures.ece_floor >= 0
    # Bins can only add error.
    assert figures.ece >= abs(figures.mean_score - figures.accepted_share) - 1e-9
    assert sum(one.num_scores for one in figures.bins) == sum(figures.histogram) == len(scores)
    order = list(range(len(scores)))
    shuffler.shuffle(order)  # type: ignore[attr-defined]
    again = reliability_figures(scores[order], outcomes[order], num_bins=num_bins)
    assert again.ece == pytest.approx(figures.ece) and again.auc == pytest.approx(figures.auc)


@pytest.mark.parametrize(
    ("num_scores", "documented"), [(1024, 0.038), (8192, 0.014), (20_000, 0.0085)]
)
def test_the_floor_is_what_right_scores_show(num_scores: int, documented: float) -> None:
    draws = np.random.default_rng(0)
    measured, floors = [], []
    for _ in range(40):
        scores = draws.random(num_scores)
        measured.append(expected_calibration_error(scores, draws.random(num_scores) < scores))
        floors.append(expected_floor(scores))
    assert np.mean(measured) == pytest.approx(np.mean(floors), rel=0.08)
    assert np.mean(floors) == pytest.approx(documented, rel=0.08)


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(TrainingError, match="do not belong together"):
        brier_score([0.1, 0.2], [1])
    with pytest.raises(TrainingError, match="do not belong together"):
        expected_calibration_error([], [])
