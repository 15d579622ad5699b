"""Levels of looks: their sum, what they leave alone, and how often ten looks err."""

from __future__ import annotations

import math

import numpy as np
import pytest

from components.contracts import Verdict
from components.errors import ConfigError
from components.evaluation.rules.estimated import estimated_rule
from components.evaluation.rules.looks import SpentSettings, at_look, next_level, spent
from components.evaluation.statistics.estimate import Estimate, threshold_verdict
from components.evaluation.statistics.power import prompts_needed
from components.evaluation.statistics.ratios import estimate_ratio
from components.settings import GateSettings


def test_all_looks_together_spend_the_level_and_no_more() -> None:
    levels = [spent(0.025, look) for look in range(1, 10_001)]
    assert levels[0] == pytest.approx(0.025 * 6 / math.pi**2)
    assert levels[1] == pytest.approx(levels[0] / 4)
    # The tail of 1 / k^2 beyond K is 1 / K to first order.
    assert sum(levels) == pytest.approx(0.025 * (1 - 6 / math.pi**2 / 10_000), rel=1e-7)
    assert sum(levels) < 0.025


@pytest.mark.parametrize("look", [0, -1])
def test_looks_are_counted_from_one(look: int) -> None:
    with pytest.raises(ConfigError, match="counted from 1"):
        spent(0.025, look)
    with pytest.raises(ConfigError, match="counted from 1"):
        at_look(GateSettings(), look)


def test_settings_of_a_look_differ_in_the_levels_only() -> None:
    settings = GateSettings(
        alpha=0.05, non_inferiority_alpha=0.01, min_speedup=1.3, min_acceptance_length=1.7
    )
    told = at_look(settings, 3)
    assert (told.alpha, told.non_inferiority_alpha) == (spent(0.05, 3), spent(0.01, 3))
    levels = {"alpha", "non_inferiority_alpha", "look"}
    assert told.model_dump(exclude=levels) == settings.model_dump(exclude=levels)
    assert isinstance(told, SpentSettings) and told.look == 3
    with pytest.raises(ConfigError, match="look 3 already"):
        at_look(told, 4)


def test_the_next_look_is_planned_for() -> None:
    told = at_look(GateSettings(alpha=0.05), 2)
    assert next_level(told.alpha, told) == pytest.approx(spent(0.05, 3))
    assert next_level(0.05, GateSettings(alpha=0.05)) == 0.05
    estimate = Estimate(1.25, 1.0, math.log(0.25), 0.2, 19.0, 20)
    result = estimated_rule(
        "x",
        estimate,
        Verdict.INCONCLUSIVE,
        threshold=1.2,
        alpha=told.alpha,
        num_prompts=20,
        settings=told,
    )
    needed = prompts_needed(estimate, 1.2, alpha=spent(0.05, 3))
    assert needed is not None and result.num_further_prompts == needed - 20


def test_ten_looks_at_a_drafter_at_the_threshold_pass_it_no_more_often_than_alpha() -> None:
    """600 gates, 24 prompts more at each look: spent, at most alpha; unspent, clearly more."""
    generator = np.random.default_rng(12)
    passes = {True: 0, False: 0}
    steps = np.full(240, 20.0)
    for _ in range(600):
        accepted = generator.negative_binomial(4, 4 / 14, 240) + 1.0  # 11 of 20 steps on average
        estimates = [
            estimate_ratio(steps[:num] + accepted[:num], steps[:num], origin=1.0)
            for num in range(24, 241, 24)
        ]
        for is_spent in passes:
            passes[is_spent] += any(
                threshold_verdict(one, 1.55, alpha=spent(0.1, look) if is_spent else 0.1)
                is Verdict.PASS
                for look, one in enumerate(estimates, start=1)
            )
    assert passes[True] / 600 <= 0.1
    assert passes[False] / 600 > 0.15
