"""BCa bootstrap intervals of ratios of sums: the gate's second opinion beside the jackknife-t of
`statistics.py`.

Bias-corrected and accelerated (B. Efron, "Better bootstrap confidence intervals", JASA 82, 1987;
Efron & Tibshirani, "An Introduction to the Bootstrap", 1993, section 14.3). A bootstrap of n units
is too narrow by sqrt((n - 1) / n) and by the normal quantile it uses for Student's t; the levels
are expanded for both (T. Hesterberg, "What Teachers Should Know About the Bootstrap", The American
Statistician 69, 2015, section 5). Whole prompts are drawn, within their slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats
from scipy.special import ndtr, ndtri

from components.evaluation.statistics.ratios import Array, Interval

COUNTS_PER_CHUNK = 4_000_000
"""Bounds the resample count matrix to 32 MB."""


def bootstrap_ratio(
    numerators: Array,
    denominators: Array,
    *,
    num_samples: int,
    seed: int,
    confidence: float = 0.95,
    strata: Sequence[str] | None = None,
) -> Interval | None:
    """BCa interval of a ratio of sums over prompts.

    Args:
        numerators: [P] per prompt.
        denominators: [P] per prompt, not negative.
        num_samples: bootstrap resamples.
        seed: of the resampling.
        confidence: two-sided level.
        strata: [P] slice of each prompt; None: all of one.

    Returns:
        (low, high), or None when fewer than two prompts have a denominator above zero, or all
        resamples are equal: nothing can be said.
    """
    num, den = np.asarray(numerators, float), np.asarray(denominators, float)
    if np.count_nonzero(den) < 2:
        return None

    def statistic(weights: Array) -> Array:  # [S, P] -> [S]
        return _divide(weights @ num, weights @ den)

    return _bca(
        statistic,
        _sizes(strata, len(num)),
        num_samples=num_samples,
        seed=seed,
        confidence=confidence,
    )


def bootstrap_relative_difference(
    num_a: Array,
    den_a: Array,
    num_b: Array,
    den_b: Array,
    *,
    num_samples: int,
    seed: int,
    confidence: float = 0.95,
    strata: Sequence[str] | None = None,
) -> Interval | None:
    """BCa interval of (ratio of a) / (ratio of b) - 1, a prompt's figures of both arms drawn
    together.

    Args:
        num_a: [P] of arm a; the other arrays alike, in the same order of prompts.
        den_a: see num_a.
        num_b: see num_a.
        den_b: see num_a.
        num_samples: bootstrap resamples.
        seed: of the resampling.
        confidence: two-sided level.
        strata: [P] slice of each prompt; None: all of one.

    Returns:
        (low, high), or None with fewer than two prompts that count in both arms, or equal
        resamples.
    """
    a, b, c, d = (np.asarray(array, float) for array in (num_a, den_a, num_b, den_b))
    if np.count_nonzero((b > 0) & (d > 0)) < 2:
        return None

    def statistic(weights: Array) -> Array:
        return _divide(_divide(weights @ a, weights @ b), _divide(weights @ c, weights @ d)) - 1.0

    return _bca(
        statistic, _sizes(strata, len(a)), num_samples=num_samples, seed=seed, confidence=confidence
    )


def _divide(numerators: Array, denominators: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(numerators / denominators)


def _sizes(strata: Sequence[str] | None, num_units: int) -> list[list[int]]:
    members: dict[str, list[int]] = {}
    for index in range(num_units):
        members.setdefault("" if strata is None else strata[index], []).append(index)
    return list(members.values())


def _bca(
    statistic: Callable[[Array], Array],
    groups: list[list[int]],
    *,
    num_samples: int,
    seed: int,
    confidence: float,
) -> Interval | None:
    """BCa interval of `statistic`, which maps unit weights [S, P] to values [S]; `groups` are drawn
    from separately.

    With z0 = Phi^-1(share of resamples below the estimate) and a = sum(d^3) / (6 sum(d^2)^1.5) over
    jackknife deviations d, the ends are the resample quantiles at Phi(z0 + (z0 + z) / (1 - a (z0 +
    z))), z = +-1.96 for 95 % of many prompts, and the t quantile times sqrt(n / (n - 1)) of few.
    """
    num_units = sum(map(len, groups))
    estimate = float(statistic(np.ones((1, num_units)))[0])
    draws = _resample(statistic, groups, num_samples, seed)
    if not np.isfinite(estimate) or len(draws) < num_samples / 2:
        return None
    # Prompts that agree say nothing of those that were not drawn.
    if np.ptp(draws) <= 1e-12 * abs(estimate):
        return None

    # Ties count half, or a discrete statistic would be called biased.
    below = (np.count_nonzero(draws < estimate) + 0.5 * np.count_nonzero(draws == estimate)) / len(
        draws
    )
    bias = float(ndtri(np.clip(below, 1 / (len(draws) + 1), len(draws) / (len(draws) + 1))))
    acceleration = _acceleration(statistic, groups)
    degrees = max(1, num_units - len(groups))
    reach = float(stats.t.ppf((1 + confidence) / 2, degrees)) * np.sqrt((degrees + 1) / degrees)

    z = np.array([-reach, reach])
    levels = ndtr(bias + (bias + z) / (1 - acceleration * (bias + z)))
    low, high = np.quantile(draws, levels)
    return (float(low), float(high))


def _resample(
    statistic: Callable[[Array], Array], groups: list[list[int]], num_samples: int, seed: int
) -> Array:
    """Finite values of `statistic` over `num_samples` multinomial resamples of the units of each
    group.
    """
    generator = np.random.default_rng(seed)
    num_units = sum(map(len, groups))
    rows = max(1, COUNTS_PER_CHUNK // num_units)
    values = []
    for start in range(0, num_samples, rows):
        weights = np.empty((min(rows, num_samples - start), num_units))
        for members in groups:
            share = np.full(len(members), 1.0 / len(members))
            weights[:, members] = generator.multinomial(len(members), share, size=len(weights))
        values.append(statistic(weights))
    draws = np.concatenate(values)
    return np.asarray(draws[np.isfinite(draws)])


def _acceleration(statistic: Callable[[Array], Array], groups: list[list[int]]) -> float:
    num_units = sum(map(len, groups))
    left_out = statistic(np.ones((num_units, num_units)) - np.eye(num_units))
    deviations = np.concatenate(
        [left_out[members].mean() - left_out[members] for members in groups]
    )
    deviations = deviations[np.isfinite(deviations)]
    spread = float(np.sum(deviations**2)) ** 1.5
    return float(np.sum(deviations**3)) / (6 * spread) if spread else 0.0
