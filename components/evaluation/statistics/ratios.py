"""Estimates of acceptance and the verdicts on several of them. Pure: numpy and scipy, no files, no
engines.

**Unit.** Acceptance length is a ratio of sums, sum(accepted + steps) / sum(steps), and tokens of
one prompt are alike, so the prompt is the unit: whole prompts vary, never steps. The overall figure
pools slices whose sizes the recipe fixed, so it varies within slices only (stratified sampling;
Cochran, "Sampling Techniques", 3rd ed. 1977, ch. 6).

**Scale.** Everything is estimated as log(value - origin): origin 1 for an acceptance length (its
drafts accepted per step, which cannot be negative), 0 for a share, -1 for a relative difference
(the log of the ratio of two lengths).

**Interval.** Jackknife-t by the delta method. With R = N / D the ratio of sums, prompt i deviates
by u_i = (num_i - R den_i) / (D - den_i) / (R - origin), its leave-one-out change (Cochran, section
6.17; the HC3 form of MacKinnon & White, J. Econometrics 29, 1985); a pair of arms deviates by the
difference of two such. The variance is sum over slices of n_h / (n_h - 1) sum (u_i - mean)^2 times
((n - 1) / n)^2, the quantile Student's t. Its degrees of freedom are Satterthwaite's 2 v^2 / Var(v)
(Biometrics Bulletin 2, 1946) with Var(v_h) = v_h^2 (kurtosis excess / n_h + 2 / (n_h - 1)): a few
prompts that carry all the variance count as few. An end goes further by the Cornish-Fisher term of
a studentised mean, skewness (2 z^2 + 1) / 6 with the skewness of the deviations' sum (P. Hall, "The
Bootstrap and Edgeworth Expansion", 1992, section 2.6), on the side the deviations lean to: the few
prompts out there are what a small sample misses. The other end stays; shortened by the same,
intervals held the truth too rarely. A single arm's upper end only: its log leans down by itself.
Coverage by simulation, and that of the BCa bootstrap (`bootstrap.py`), which is reported beside it
and too narrow below 16 prompts: `make bench NAME=evaluation`.

**No spread is no certainty.** What a prompt counts would come out otherwise on another text of its
kind, by no less than a Poisson count of that size, so prompts that agree to the token agree by
chance. Each slice is therefore taken as if one prompt more had been seen, off by just that: the
squared deviation

    c / C^2,      c: counted per prompt of the slice, 1 at the least;      C: sum(num - origin den)
    of all prompts

is added to the variance: the relative variance 1 / c of a count c (A. Agresti, "Categorical Data
Analysis", 3rd ed. 2013, section 1.2) at one prompt's share of the whole. Of a length, c is the
accepted drafts. Of a pair of arms on one text, what both accept says nothing of their difference: a
= s + x, b = s + y with Var(a - b) = E(x + y), at least E|a
- b| (McNemar's test, too, counts discordant pairs only; Psychometrika 12, 1947), so c is the mean
  |a - b| and C^2 the
product of both arms' tokens. It is a prior worth one prompt, as in moderated t tests (G. Smyth,
Stat. Appl. Genet. Mol. Biol. 3, 2004), but one that only ever widens: its degree of freedom is not
claimed. Against a real spread it vanishes as 1 / n; n equal prompts of c counts have a standard
error of 1 / (n sqrt(c)). Where nothing was counted there is no log; the tests are those of a
Poisson zero (`estimate.py`).

**Several slices.** Three claims, three corrections:
- "non-inferior on every slice" is an intersection-union test (Berger, Technometrics 24, 1982): each
  slice at level alpha bounds the false pass of the whole at alpha, whichever slice is worse. A
  correction would only lose power.
- "worse than the margin on some slice", the claim behind a fail, is a union: Holm's step-down
  correction over the slices (Scand. J. Statistics 6, 1979) bounds the chance of failing a drafter
  that is worse on none.
- "better on slice X" is a choice among slices as well: Holm.
Superiority overall is one claim, tested once, and made only of a drafter that passes everything
else.

**Several looks.** An inconclusive rule names the prompts it needs (`power.py`). Measuring them and
deciding again is another look: each spends its part of the level, so that any number of them errs
no more often than one (`looks.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from components.contracts import Verdict
from components.evaluation.statistics.estimate import Array, Estimate, Interval, threshold_verdict

__all__ = [
    "Array",
    "Estimate",
    "Interval",
    "estimate_ratio",
    "estimate_relative_difference",
    "holm",
    "non_inferiority_verdicts",
    "ratio_of_sums",
    "relative_difference",
    "threshold_verdict",
]


def ratio_of_sums(numerators: Array, denominators: Array) -> float:
    """sum(numerators) / sum(denominators), NaN when the denominators sum to zero."""
    total = float(np.sum(denominators))
    return float(np.sum(numerators)) / total if total else float("nan")


def relative_difference(num_a: Array, den_a: Array, num_b: Array, den_b: Array) -> float:
    """(ratio of a) / (ratio of b) - 1; -0.05 means a is 5 % below b. NaN where the ratio of b is
    zero or NaN.
    """
    theirs = ratio_of_sums(num_b, den_b)
    return ratio_of_sums(num_a, den_a) / theirs - 1.0 if theirs else float("nan")


def estimate_ratio(
    numerators: Array, denominators: Array, *, origin: float, strata: Sequence[str] | None = None
) -> Estimate | None:
    """A ratio of sums over prompts.

    Args:
        numerators: [P] per prompt.
        denominators: [P] per prompt, not negative; prompts at zero do not count.
        origin: what the ratio cannot fall below; what is above it was counted (accepted drafts).
        strata: [P] slice of each prompt; None: all of one.

    Returns:
        None when fewer than two prompts count: nothing can be said.
    """
    num, den = np.asarray(numerators, float), np.asarray(denominators, float)
    used = den > 0
    num_prompts = int(np.count_nonzero(used))
    if num_prompts < 2:
        return None

    value = ratio_of_sums(num, den)
    if value <= origin:
        return Estimate(
            value,
            origin,
            -math.inf,
            0.0,
            float(num_prompts - 1),
            num_prompts,
            num_trials=float(den.sum()),
        )

    counted = num - origin * den
    estimate = _estimate(
        value,
        origin,
        deviations=_deviations(num, den, origin)[used],
        noise=(counted / counted.sum() ** 2)[used],
        one_count=1 / float(counted.sum()) ** 2,
        strata=_chosen(strata, used),
    )

    # The log took the skewness of easy prompts away, and more than that where there is none: never
    # back on its side.
    return replace(estimate, skewness=max(0.0, estimate.skewness))


def estimate_relative_difference(
    num_a: Array,
    den_a: Array,
    num_b: Array,
    den_b: Array,
    *,
    origin: float = 1.0,
    strata: Sequence[str] | None = None,
) -> Estimate | None:
    """`relative_difference` of two arms over the same prompts, a prompt's figures of both arms
    varying together.

    Args:
        num_a: [P] of arm a; the other arrays alike, in the same order of prompts.
        den_a: see num_a.
        num_b: see num_a.
        den_b: see num_a.
        origin: of either arm's ratio, as in `estimate_ratio`: 1 for acceptance lengths, 0 for
            shares.
        strata: [P] slice of each prompt; None: all of one.

    Returns:
        None with fewer than two prompts that count in both arms, or a ratio that is not a positive
        number.
    """
    a, b, c, d = (np.asarray(array, float) for array in (num_a, den_a, num_b, den_b))
    if np.count_nonzero((b > 0) & (d > 0)) < 2:
        return None

    value = relative_difference(a, b, c, d)
    if not math.isfinite(value) or value <= -1:
        return None

    used = (b > 0) | (d > 0)
    # On the scale of the deviations, which are of whole ratios.
    one_count = 1 / float(a.sum() * c.sum())
    noise = np.abs((a - origin * b) - (c - origin * d)) * one_count
    return _estimate(
        value,
        -1.0,
        deviations=(_deviations(a, b, 0.0) - _deviations(c, d, 0.0))[used],
        noise=noise[used],
        one_count=one_count,
        strata=_chosen(strata, used),
    )


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values: the k-th smallest of m is multiplied by m - k + 1, never below the
    one before it.
    """
    adjusted: dict[str, float] = {}
    reached = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        reached = max(reached, min(1.0, (len(p_values) - rank) * p))
        adjusted[name] = reached
    return {name: adjusted[name] for name in p_values}


def non_inferiority_verdicts(
    estimates: Mapping[str, Estimate | None], margin: float, *, alpha_pass: float, alpha_fail: float
) -> dict[str, Verdict]:
    """Verdict per slice on relative differences: pass at or above -margin, fail below it; see the
    module's docstring.

    Args:
        estimates: by slice; None where nothing can be said.
        margin: relative, 0.05 for 5 %.
        alpha_pass: one-sided level of each slice's pass, which bounds the false pass of all of them
            together.
        alpha_fail: one-sided level of the fails, held over all slices by Holm's correction.
    """
    known = {
        name: one for name, one in estimates.items() if one is not None and math.isfinite(one.value)
    }
    worse = holm({name: one.p_below(-margin) for name, one in known.items()})
    verdicts = dict.fromkeys(estimates, Verdict.INCONCLUSIVE)
    for name, one in known.items():
        if one.p_above(-margin) <= alpha_pass:
            verdicts[name] = Verdict.PASS
        elif worse[name] <= alpha_fail:
            verdicts[name] = Verdict.FAIL
    return verdicts


def _deviations(num: Array, den: Array, origin: float) -> Array:
    """[P] change of log(ratio - origin) by each prompt, as leaving it out shows it."""
    total = float(den.sum())
    ratio = float(num.sum()) / total
    # A prompt that holds every step has nothing to be left out of.
    rest = np.where(den < total, total - den, np.inf)
    return np.asarray((num - ratio * den) / rest / (ratio - origin))


def _estimate(
    value: float,
    origin: float,
    *,
    deviations: Array,
    noise: Array,
    one_count: float,
    strata: Sequence[str],
) -> Estimate:
    """Variance, degrees of freedom and skewness of [P] log deviations; see the module's docstring.

    Args:
        value, origin: of the estimate.
        deviations: [P] change of the log by each prompt.
        noise: [P] variance of that change by the counting noise of the prompt's own figures.
        one_count: variance by a single count, which that of a further prompt does not fall below.
        strata: [P] slice of each prompt.
    """
    num_prompts = len(deviations)
    observed = 0.0
    added = 0.0
    spread_of_variance = 0.0
    degrees = 0
    groups = _groups(strata)
    centred = [deviations[members] - deviations[members].mean() for members in groups]

    for members, group in zip(groups, centred, strict=True):
        size = len(group)
        squares = float(np.sum(group**2))
        part = squares * size / (size - 1) * ((num_prompts - 1) / num_prompts) ** 2
        observed += part
        added += max(float(np.mean(noise[members])), one_count)
        spread_of_variance += part**2 * (max(0.0, _excess_kurtosis(group)) / size + 2 / (size - 1))
        degrees += size - 1

    variance = observed + added
    effective = (
        min(float(degrees), 2 * variance**2 / spread_of_variance)
        if spread_of_variance
        else float(degrees)
    )

    return Estimate(
        value,
        origin,
        math.log(value - origin),
        math.sqrt(variance),
        effective,
        num_prompts,
        # The noise leans to neither side, so it takes its share of the spread from what leans.
        _skewness(np.concatenate(centred), degrees) * (observed / variance) ** 1.5,
    )


def _excess_kurtosis(centred: Array) -> float:
    squares = float(np.sum(centred**2))
    return float(len(centred) * np.sum(centred**4) / squares**2 - 3.0) if squares else 0.0


def _skewness(centred: Array, degrees: int) -> float:
    """Skewness of the sum of deviations, which is that of one over sqrt(n).

    A sample's own skewness is too small: G1 of Joanes & Gill (The Statistician 47, 1998). And it
    means less where tails are light: two kinds of prompts in unequal numbers lean to a side without
    a sample missing any. There the term is damped by 1 + excess kurtosis / 2, which is what kept
    intervals on such data from holding the truth too often.
    """
    squares = float(np.sum(centred**2))
    if not squares or degrees < 2:  # two prompts are never skewed
        return 0.0
    sampled = (
        float(np.sum(centred**3))
        / squares**1.5
        * math.sqrt(degrees * (degrees + 1))
        / (degrees - 1)
    )
    return float(sampled * min(1.0, max(0.0, 1 + _excess_kurtosis(centred) / 2)))


def _groups(strata: Sequence[str]) -> list[list[int]]:
    """Indices of each stratum. One with a single prompt shows no spread: such are put together
    (collapsed strata).
    """
    by_name: dict[str, list[int]] = {}
    for index, name in enumerate(strata):
        by_name.setdefault(name, []).append(index)
    groups = [members for members in by_name.values() if len(members) > 1]
    single = [index for members in by_name.values() if len(members) == 1 for index in members]
    if len(single) > 1 or not groups:
        return [*groups, single] if single else groups
    largest = max(groups, key=len)
    return [members + single if members is largest else members for members in groups]


def _chosen(strata: Sequence[str] | None, used: NDArray[np.bool_]) -> list[str]:
    names = ["" for _ in used] if strata is None else list(strata)
    return [name for name, keep in zip(names, used, strict=True) if keep]
