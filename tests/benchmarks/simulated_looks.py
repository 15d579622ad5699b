"""Simulated gates that look again and again, and gates on speed: how often they err, and what more
rounds buy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from components.contracts import Verdict
from components.evaluation.rounds import estimate_speedup
from components.evaluation.rules.looks import at_look, next_level
from components.evaluation.statistics.estimate import Estimate, threshold_verdict
from components.evaluation.statistics.power import prompts_needed
from components.evaluation.statistics.ratios import (
    estimate_ratio,
    estimate_relative_difference,
    relative_difference,
)
from components.settings import GateSettings
from tests.benchmarks.loop_figures import at_least, at_most
from tests.benchmarks.run import Figure
from tests.benchmarks.simulated_gates import KINDS, Array, World, simulate

NUM_LOOKS = 10
NUM_GATES, NUM_ASKING_GATES = 2_000, 300
POOL_PROMPTS = 100_000
"""Gates draw their prompts from so many simulated ones, whose own ratio is the truth: exactly at
the threshold.
"""
NUM_SPEED_GATES = 10_000
ROUND_NOISE = 0.08
"""Spread of one arm's throughput from round to round; a ratio's is sqrt(2) times that."""
SPEED_LIMIT = 1.2

Estimator = Callable[[Array], Estimate | None]
"""From the pool's places drawn to an estimate."""


def look_figures(first: int) -> list[Figure]:
    """False passes of a drafter exactly at the threshold, over up to ten looks from `first` prompts
    on, in per cent.

    Each look adds as many prompts again, or, on one kind of prompts, as many as were asked for (500
    at most). Only a pass ends the looking, so that the rate is the worst a person can come to who
    looks until it passes.
    """
    figures = []
    for kind in KINDS:
        generator = np.random.default_rng([len(kind), first])
        pool = [
            array[0] for array in simulate(World(kind, shift=0.1), (1, POOL_PROMPTS), generator)
        ]
        a, b, c, d = pool
        for what, estimate, truth in (
            ("length", _length_of(pool), float(a.sum() / b.sum())),
            ("difference", _difference_of(pool), relative_difference(a, b, c, d)),
        ):
            rates = _false_passes(estimate, truth, first, generator)
            figures.append(_told(f"one_look_{what}_{kind}", rates["one"]))
            figures.append(_told(f"ten_looks_unspent_{what}_{kind}", rates["unspent"]))
            figures.append(at_most(f"ten_looks_{what}_{kind}", rates["spent"], 2.5, "%"))
        if kind == KINDS[0]:
            asked = _false_passes_as_asked(
                _length_of(pool), float(a.sum() / b.sum()), first, generator
            )
            figures.append(at_most(f"ten_looks_as_asked_length_{kind}", asked, 2.5, "%"))
    return figures


def _length_of(pool: list[Array]) -> Estimator:
    return lambda chosen: estimate_ratio(pool[0][chosen], pool[1][chosen], origin=1.0)


def _difference_of(pool: list[Array]) -> Estimator:
    return lambda chosen: estimate_relative_difference(*(array[chosen] for array in pool))


def _false_passes(
    estimate: Estimator, truth: float, first: int, generator: np.random.Generator
) -> dict[str, float]:
    """Per cent of gates with a pass: at the first look at the whole level, at any of ten, and at
    any of them spent.
    """
    settings = GateSettings()
    levels = [at_look(settings, look).alpha for look in range(1, NUM_LOOKS + 1)]
    counts = dict.fromkeys(("one", "unspent", "spent"), 0)
    for _ in range(NUM_GATES):
        prompts = generator.integers(0, POOL_PROMPTS, first * NUM_LOOKS)
        looks = [estimate(prompts[: first * look]) for look in range(1, NUM_LOOKS + 1)]
        counts["one"] += _passes(looks[0], truth, settings.alpha)
        counts["unspent"] += any(_passes(one, truth, settings.alpha) for one in looks)
        counts["spent"] += any(
            _passes(one, truth, level) for one, level in zip(looks, levels, strict=True)
        )
    return {what: 100 * count / NUM_GATES for what, count in counts.items()}


def _false_passes_as_asked(
    estimate: Estimator, truth: float, first: int, generator: np.random.Generator
) -> float:
    passes = 0
    most = GateSettings().max_further_prompts
    for _ in range(NUM_ASKING_GATES):
        prompts = generator.integers(0, POOL_PROMPTS, first)
        for look in range(1, NUM_LOOKS + 1):
            settings = at_look(GateSettings(), look)
            one = estimate(prompts)
            if _passes(one, truth, settings.alpha):
                passes += 1
                break
            needed = prompts_needed(one, truth, alpha=next_level(settings.alpha, settings))
            more = min(most, max(1, needed - len(prompts))) if needed is not None else first
            prompts = np.concatenate([prompts, generator.integers(0, POOL_PROMPTS, more)])
    return 100 * passes / NUM_ASKING_GATES


def _passes(estimate: Estimate | None, threshold: float, alpha: float) -> bool:
    return threshold_verdict(estimate, threshold, alpha=alpha) is Verdict.PASS


def speed_figures() -> list[Figure]:
    """Share of gates that pass a speed-up limit of 1.2 at the first look, by truth and rounds.

    Above the limit more rounds must pass more often; at and below it no more often than alpha.
    """
    alpha = at_look(GateSettings(), 1).alpha
    generator = np.random.default_rng(20_261_201)
    figures = []
    before = 0.0
    for num_rounds in (1, 2, 3, 6, 12):
        share = _speed_passes(1.3, num_rounds, alpha, generator)
        name = f"speed_pass_truth_1.3_rounds_{num_rounds}"
        figures.append(
            at_most(name, share, 0, "%") if num_rounds == 1 else at_least(name, share, before, "%")
        )
        before = share
        for truth in (1.2, 1.1):
            rate = _speed_passes(truth, num_rounds, alpha, generator)
            figures.append(
                at_most(f"speed_false_pass_truth_{truth}_rounds_{num_rounds}", rate, 2.5, "%")
            )
    return figures


def _speed_passes(
    truth: float, num_rounds: int, alpha: float, generator: np.random.Generator
) -> float:
    rates = np.exp(generator.normal(0.0, ROUND_NOISE, (NUM_SPEED_GATES, 2, num_rounds)))
    passes = sum(
        _passes(estimate_speedup(list(truth * ours), list(theirs)), SPEED_LIMIT, alpha)
        for ours, theirs in rates
    )
    return 100 * passes / NUM_SPEED_GATES


def _told(name: str, value: float) -> Figure:
    return Figure(name=name, value=value, unit="%", goal="-", ok=True)
