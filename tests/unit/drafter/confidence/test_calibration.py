"""Sequential temperature scaling: known temperatures come back, nothing is measured on what it was
fitted on.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from components.contracts import Calibration
from components.drafter.confidence.calibration import MIN_EVENTS, fit_calibration, survival
from components.drafter.confidence.reliability import reliability_figures
from components.errors import ConfigError, TrainingError

NUM_BLOCKS, NUM_POSITIONS, BLOCKS_PER_CONVERSATION = 12_000, 3, 40


@pytest.fixture(scope="module")
def right() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits whose sigmoid is the probability of acceptance, acceptances drawn from it,
    conversations.
    """
    draws = np.random.default_rng(7)
    logits_NK = draws.normal(0.5, 1.5, (NUM_BLOCKS, NUM_POSITIONS))
    accepted_NK = draws.random(logits_NK.shape) < expit(logits_NK)
    return logits_NK, accepted_NK, np.arange(NUM_BLOCKS) // BLOCKS_PER_CONVERSATION


Blocks = tuple[np.ndarray, np.ndarray, np.ndarray]


def test_right_logits_are_left_alone(right: Blocks) -> None:
    fitted = fit_calibration(*right)
    assert fitted.temperatures == pytest.approx([1.0] * NUM_POSITIONS, abs=0.12)
    assert fitted.biases == pytest.approx([0.0] * NUM_POSITIONS, abs=0.12)
    assert fitted.is_fitted == (True,) * NUM_POSITIONS
    assert fitted.before.ece < 0.01 and fitted.after.ece < 0.01
    assert (fitted.num_blocks, fitted.num_conversations, fitted.num_folds) == (12_000, 300, 5)


@pytest.mark.parametrize("with_bias", [True, False])
def test_logits_times_three_give_temperature_three(right: Blocks, with_bias: bool) -> None:
    logits_NK, accepted_NK, conversations_N = right
    fitted = fit_calibration(3 * logits_NK, accepted_NK, conversations_N, with_bias=with_bias)
    assert fitted.temperatures == pytest.approx([3.0] * NUM_POSITIONS, rel=0.1)
    if not with_bias:
        assert fitted.biases == (0.0,) * NUM_POSITIONS
    assert (
        fitted.before.ece > 0.05
        and fitted.after.ece < 0.01
        and fitted.after.brier < fitted.before.brier
    )
    one = fit_calibration(
        3 * logits_NK[:, :1], accepted_NK[:, :1], conversations_N, with_bias=with_bias
    )
    # One temperature keeps the order, but for folds.
    assert one.after.auc == pytest.approx(one.before.auc, abs=2e-3)


def test_a_shift_needs_the_bias(right: Blocks) -> None:
    logits_NK, accepted_NK, conversations_N = right
    shifted_NK = 2 * (logits_NK - 1)
    both = fit_calibration(shifted_NK, accepted_NK, conversations_N)
    assert both.temperatures == pytest.approx([2.0] * NUM_POSITIONS, rel=0.1)
    assert both.biases == pytest.approx([1.0] * NUM_POSITIONS, abs=0.12)
    alone = fit_calibration(shifted_NK, accepted_NK, conversations_N, with_bias=False)
    assert alone.after.ece > 0.03 > 0.01 > both.after.ece


def test_positions_have_their_own_temperatures(right: Blocks) -> None:
    logits_NK, accepted_NK, conversations_N = right
    fitted = fit_calibration(logits_NK * [0.5, 1.0, 2.0], accepted_NK, conversations_N)
    assert fitted.temperatures == pytest.approx([0.5, 1.0, 2.0], rel=0.1)


def test_a_conversation_is_never_scored_by_a_fit_on_itself(right: Blocks) -> None:
    """With a fold per conversation, the figures are those of fits that each left one conversation
    out.
    """
    logits_NK, accepted_NK, conversations_N = (array[:800].copy() for array in right)
    accepted_NK[conversations_N == 3] ^= (
        True  # labels that would move its own scores, were they fitted on
    )
    fitted = fit_calibration(logits_NK, accepted_NK, conversations_N, num_folds=20)
    assert fitted.num_folds == fitted.num_conversations == 20
    scores_NK = np.empty_like(logits_NK)
    for conversation in range(20):
        own = conversations_N == conversation
        others = fit_calibration(logits_NK[~own], accepted_NK[~own], conversations_N[~own])
        scores_NK[own] = survival(logits_NK[own], others)
    survived_NK = np.logical_and.accumulate(accepted_NK, axis=1)
    assert fitted.after == reliability_figures(scores_NK.ravel(), survived_NK.ravel())
    on_itself = survival(logits_NK, fitted)
    assert fitted.after != reliability_figures(on_itself.ravel(), survived_NK.ravel())


def test_a_few_of_one_kind_are_not_fitted() -> None:
    draws = np.random.default_rng(0)
    logits_NK = draws.normal(size=(200, 2))
    conversations_N = np.arange(200) // 10
    accepted_NK = np.ones((200, 2), bool)
    for outcome, share in ((True, 1.0), (False, 0.0)):
        fitted = fit_calibration(logits_NK, accepted_NK == outcome, conversations_N)
        assert (fitted.temperatures, fitted.biases, fitted.is_fitted) == (
            (1.0, 1.0),
            (0.0, 0.0),
            (False, False),
        )
        assert fitted.after == fitted.before and fitted.before.auc is None
        assert fitted.before.accepted_share == share
    accepted_NK[: MIN_EVENTS - 1, 1] = False
    assert fit_calibration(logits_NK, accepted_NK, conversations_N).is_fitted == (False, False)
    accepted_NK[: 3 * MIN_EVENTS, 1] = False
    assert fit_calibration(logits_NK, accepted_NK, conversations_N).is_fitted == (False, True)


def test_one_conversation_fits_nothing_and_says_so(right: Blocks) -> None:
    logits_NK, accepted_NK, conversations_N = right
    fitted = fit_calibration(logits_NK, accepted_NK, np.zeros_like(conversations_N))
    assert (fitted.num_folds, fitted.num_conversations, fitted.is_fitted) == (
        0,
        1,
        (False,) * NUM_POSITIONS,
    )
    assert fitted.after == fitted.before and fitted.temperatures == (1.0,) * NUM_POSITIONS


def test_slots_that_are_not_valid_do_not_count(right: Blocks) -> None:
    logits_NK, accepted_NK, conversations_N = (array[:2000] for array in right)
    valid_NK = np.ones_like(accepted_NK)
    valid_NK[::3, 1:] = False
    noise_NK = np.where(valid_NK, logits_NK, np.nan)
    fitted = fit_calibration(noise_NK, accepted_NK & valid_NK, conversations_N, valid_NK=valid_NK)
    again = fit_calibration(logits_NK, accepted_NK | ~valid_NK, conversations_N, valid_NK=valid_NK)
    assert fitted == again
    assert [one.num_scores for one in fitted.after_by_position] == valid_NK.sum(0).tolist()


def test_late_positions_that_no_block_reaches_have_no_figures(right: Blocks) -> None:
    logits_NK, accepted_NK, conversations_N = (array[:400] for array in right)
    valid_NK = np.ones_like(accepted_NK)
    valid_NK[:, 2] = False
    fitted = fit_calibration(logits_NK, accepted_NK, conversations_N, valid_NK=valid_NK)
    assert len(fitted.after_by_position) == 2 and fitted.is_fitted[2] is False


def test_it_survives_json(right: Blocks, tmp_path: Path) -> None:
    fitted = fit_calibration(*(array[:400] for array in right), target_weights="a" * 64)
    assert Calibration.read(fitted.write(tmp_path / "calibration.json")) == fitted


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.floats(0.01, 100))
def test_survival_never_rises_and_lies_in_range(
    seed: int, num_positions: int, scale: float
) -> None:
    logits_NK = np.random.default_rng(seed).normal(0, scale, (20, num_positions))
    scores_NK = survival(logits_NK)
    assert (
        (scores_NK >= 0).all()
        and (scores_NK <= 1).all()
        and (np.diff(scores_NK, axis=1) <= 0).all()
    )
    np.testing.assert_allclose(scores_NK, expit(logits_NK).cumprod(1), atol=1e-12)


def test_survival_uses_temperature_and_bias(right: Blocks) -> None:
    fitted = fit_calibration(*(array[:400] for array in right))
    logits_NK = right[0][:5]
    expected_NK = expit(
        logits_NK / np.array(fitted.temperatures) + np.array(fitted.biases)
    ).cumprod(1)
    np.testing.assert_allclose(survival(logits_NK, fitted), expected_NK)
    # A shorter draft.
    np.testing.assert_allclose(survival(logits_NK[:, :2], fitted), expected_NK[:, :2])


def test_what_cannot_be_calibrated_is_refused(right: Blocks) -> None:
    logits_NK, accepted_NK, conversations_N = (array[:50] for array in right)
    with pytest.raises(TrainingError, match="do not belong together"):
        fit_calibration(logits_NK, accepted_NK[:, :1], conversations_N)
    with pytest.raises(TrainingError, match="cannot be calibrated on"):
        fit_calibration(logits_NK, accepted_NK, conversations_N[:-1])
    with pytest.raises(TrainingError, match="cannot be calibrated on"):
        fit_calibration(
            logits_NK, accepted_NK, conversations_N, valid_NK=np.zeros_like(accepted_NK)
        )
    gap_NK = np.ones_like(accepted_NK)
    gap_NK[:, 1] = False
    with pytest.raises(TrainingError, match="without a gap"):
        fit_calibration(logits_NK, accepted_NK, conversations_N, valid_NK=gap_NK)
    with pytest.raises(TrainingError, match="not finite"):
        fit_calibration(np.full_like(logits_NK, np.inf), accepted_NK, conversations_N)
    fitted = fit_calibration(logits_NK, accepted_NK, conversations_N)
    with pytest.raises(ConfigError, match="fewer draft positions"):
        survival(np.zeros((2, NUM_POSITIONS + 1)), fitted)
    with pytest.raises(ConfigError, match="confidence logits"):
        survival(np.zeros(3))
