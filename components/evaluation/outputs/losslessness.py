"""Rules on outputs: what is served with the drafter is the target's own. Pure; the machine is its
own control.

**Greedy.** bf16 kernels round by batch shape, so two runs of one engine part at near-ties, and how
often depends on the machine (47 of 48 equal on one load, 22 of 48 on another;
docs/lab-notes/gate.md). A drafter is lossless if it parts from the plain engine no otherwise than
the plain engine parts from itself. Three claims, each at a third of the recipe's
`losslessness_alpha`:

- *reach*: nowhere does the drafting engine choose a token whose margin rounding cannot bridge.
  Rounding reaches as far as it was seen to move any gap when the plain engine answered again, at
  thousands of positions, times `REACH`, and at least two steps of the dtype at a logit of 16 to 32.
  With n gaps seen and tails that fall off at least exponentially, P(a gap moves by more than twice
  the largest of n) is about 1/n^2 a position: over the n positions of a gate 1/n, and only where
  the gap happens to lie in between. Simulated: `make bench NAME=evaluation`.
- *share*: not more prompts part than the plain engine's own, at as many rows a step as verification
  has (requests in flight times K + 1). The exact test of paired shares (Q. McNemar, Psychometrika
  12, 1947): of the prompts that part in one of the two only, those of the drafter are Binomial(n,
  1/2) or fewer.
- *margins*: those at which the drafter parts are no larger than those at which the plain engine
  parts from itself (H. Mann & D. Whitney, Annals of Mathematical Statistics 18, 1947). On a machine
  that rounds far, where reach excuses much, this finds an engine that keeps wrong drafts.

**Sampled.** Draws of the first tokens of a few prompts, with and without the drafter, are two
samples of one distribution. A permutation test (E. Pitman, JRSS Supplement 4, 1937) on the sum,
over prompts and prefix lengths, of Pearson's statistic of the two tables of prefixes: exact at any
number of draws, rare prefixes included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from components.contracts import (
    AcceptanceReport,
    Divergence,
    RuleResult,
    SampledOutputs,
    SelfComparison,
    Verdict,
)
from components.settings import GateSettings

REACH = 2.0
"""Times the largest gap change seen: what rounding may still do at a position that was not seen."""

NUM_CLAIMS = 3

MIN_GAPS = 200
"""Fewer positions of equal context say too little about rounding for a divergence to be judged by
them.
"""

SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}
LOGIT_SIZE = 16.0
"""Lower end of the binade that the best logits of a language model lie in, 16 to 32."""
MIN_ROUNDING_NATS = 1e-3
"""Of float32, whose last step is nothing beside what a network's sums add up to."""

NUM_PERMUTATIONS = 9_999


def rounding_floor_nats(dtype: str) -> float:
    """Two steps of `dtype` at a logit of 16 to 32, in nats: one for each of the two logits of a
    gap.
    """
    bits = SIGNIFICANT_BITS.get(dtype, SIGNIFICANT_BITS["bfloat16"])
    return max(2 * LOGIT_SIZE * 2.0 ** (1 - bits), MIN_ROUNDING_NATS)


def losslessness(report: AcceptanceReport, settings: GateSettings) -> RuleResult | None:
    """Greedy outputs part from no_draft's only where, and only as often as, rounding explains it;
    None above 0.
    """
    if report.temperature > 0:
        return None
    equal, different = report.compared_outputs()
    if not equal and not different:
        return _undecided("the plain engine was not measured")
    if set(report.divergences) != different:
        return _undecided("where the outputs part was not looked at")
    if not report.self_comparisons:
        return _undecided("the plain engine was not measured against itself")

    judged = judge_outputs(
        report.divergences,
        report.self_comparisons,
        dtype=report.dtype,
        alpha=settings.losslessness_alpha,
    )

    if judged.verdict is Verdict.INCONCLUSIVE:
        return _undecided(
            f"only {judged.num_gaps} gaps of equal context were seen, {MIN_GAPS} are needed"
        )

    largest = max(map(margin_of, report.divergences.values()), default=0.0)
    return RuleResult(
        rule="losslessness",
        verdict=judged.verdict,
        value=largest if math.isfinite(largest) else None,
        threshold=judged.reach_nats,
        detail=_words(report, judged, level=settings.losslessness_alpha / NUM_CLAIMS),
        p_values={
            "more outputs part than the plain engine's own": judged.share_p_value,
            "they part at larger margins than its own": judged.margins_p_value,
        },
        num_prompts=len(equal) + len(different),
    )


@dataclass(frozen=True)
class JudgedOutputs:
    """What comparing the drafter's greedy outputs with the plain engine's own gave.

    Attributes:
        verdict: of the claims together; inconclusive where too few gaps were seen to excuse
            anything by rounding.
        reach_nats: the largest margin that rounding explains.
        beyond: divergences that it does not explain, by prompt id.
        share_p_value: one-sided p of "not more outputs part than the plain engine's own".
        margins_p_value: one-sided p of "they part at no larger margins than its own".
        num_gaps: positions of equal context behind `reach_nats`.
    """

    verdict: Verdict
    reach_nats: float
    beyond: Mapping[str, Divergence]
    share_p_value: float
    margins_p_value: float
    num_gaps: int


def judge_outputs(
    divergences: Mapping[str, Divergence],
    itself: Sequence[SelfComparison],
    *,
    dtype: str,
    alpha: float,
) -> JudgedOutputs:
    """Judge the three claims of this module at a third of `alpha` each.

    Args:
        divergences: of the drafter's outputs from the plain engine's, by prompt id.
        itself: the plain engine against itself; at least one.
        dtype: that the engines compute in.
        alpha: chance that a lossless drafter fails.
    """
    reach = rounding_reach_nats(itself, dtype=dtype)
    beyond = {name: one for name, one in divergences.items() if margin_of(one) > reach}
    p_value = share_p_value(set(divergences), matched_control(itself))
    margins_p = margins_p_value(
        divergences.values(), [d for one in itself for d in one.divergences.values()]
    )
    num_gaps = sum(one.num_gaps for one in itself)
    is_lossy = bool(beyond) or min(p_value, margins_p) <= alpha / NUM_CLAIMS
    verdict = Verdict.FAIL if is_lossy else Verdict.PASS
    if verdict is Verdict.PASS and num_gaps < MIN_GAPS:
        verdict = Verdict.INCONCLUSIVE
    return JudgedOutputs(verdict, reach, beyond, p_value, margins_p, num_gaps)


def margin_of(divergence: Divergence) -> float:
    """Its margin in nats; infinite where an answer was cut."""
    return math.inf if divergence.margin_nats is None else divergence.margin_nats


def rounding_reach_nats(itself: Sequence[SelfComparison], *, dtype: str) -> float:
    """The largest margin that rounding explains on the machine that measured `itself`."""
    seen = max((one.max_gap_change_nats for one in itself), default=0.0)
    return max(rounding_floor_nats(dtype), REACH * seen)


def matched_control(comparisons: Sequence[SelfComparison]) -> SelfComparison:
    """The comparison at most requests in flight: the one with as many rows a step as verification
    has.
    """
    return max(comparisons, key=lambda one: one.num_in_flight)


def share_p_value(parted: set[str], control: SelfComparison) -> float:
    """One-sided exact p of "the drafter's outputs part no more often than the plain engine's own".

    Args:
        parted: ids of the prompts whose output parts with the drafter.
        control: of the same prompts; others do not count.
    """
    ours = parted & set(control.digests)
    theirs = set(control.divergences)
    only_ours, only_theirs = len(ours - theirs), len(theirs - ours)
    if only_ours == 0:
        return 1.0
    return float(stats.binom.sf(only_ours - 1, only_ours + only_theirs, 0.5))


def margins_p_value(ours: Iterable[Divergence], own: Iterable[Divergence]) -> float:
    """One-sided p of "the drafter's outputs part at no larger margins than the plain engine's own";
    1.0 where one of the two has none.
    """
    larger, smaller = [margin_of(one) for one in ours], [margin_of(one) for one in own]
    if not larger or not smaller:
        return 1.0
    return float(stats.mannwhitneyu(larger, smaller, alternative="greater").pvalue)


def sampled_losslessness(sampled: SampledOutputs, settings: GateSettings) -> RuleResult:
    """Tokens drawn with the drafter and without it come from one distribution; a permutation test
    at the level.
    """
    p_value = two_sample_p_value(sampled, seed=settings.seed)
    draws = [len(one) for one in (*sampled.plain.values(), *sampled.drafted.values())]
    level = settings.losslessness_alpha
    verdict = Verdict.FAIL if p_value <= level else Verdict.PASS
    return RuleResult(
        rule=f"losslessness at temperature {sampled.temperature:g}",
        verdict=verdict,
        value=p_value,
        threshold=level,
        detail=f"p of one distribution with and without the drafter, over {len(sampled.plain)} "
        "prompts and"
        f" {min(draws, default=0)} draws each; below the limit it fails",
        p_values={"one distribution": p_value},
        num_prompts=len(sampled.plain),
    )


def two_sample_p_value(
    sampled: SampledOutputs, *, seed: int, num_permutations: int = NUM_PERMUTATIONS
) -> float:
    """(1 + permutations at least as far apart) / (1 + permutations); 1.0 without a draw on either
    side.
    """
    generator = np.random.default_rng(seed)
    observed = 0.0
    permuted = np.zeros(num_permutations)
    for prompt_id in sorted(sampled.plain.keys() & sampled.drafted.keys()):
        plain, drafted = sampled.plain[prompt_id], sampled.drafted[prompt_id]
        if not plain or not drafted:
            continue
        codes = _prefix_codes([*plain, *drafted])
        is_drafted = np.arange(len(plain) + len(drafted)) >= len(plain)
        observed += _distance(codes, is_drafted[None])[0]
        order = generator.permuted(np.tile(is_drafted, (num_permutations, 1)), axis=1)
        permuted += _distance(codes, order)

    at_least = np.count_nonzero(permuted >= observed - 1e-9)
    return float((1 + at_least) / (1 + num_permutations))


def _prefix_codes(draws: Sequence[tuple[int, ...]]) -> list[NDArray[np.int64]]:
    """[D] number of each draw's prefix of 1, 2, ... tokens; equal prefixes have equal numbers."""
    longest = max(map(len, draws))
    codes = []
    for length in range(1, longest + 1):
        numbers: dict[tuple[int, ...], int] = {}
        codes.append(np.array([numbers.setdefault(draw[:length], len(numbers)) for draw in draws]))
    return codes


def _distance(
    codes: Sequence[NDArray[np.int64]], is_drafted_SD: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """[S] sum over prefix lengths of Pearson's statistic, divided by its degrees of freedom, per
    labelling S.
    """
    share = is_drafted_SD[0].mean()
    total = np.zeros(len(is_drafted_SD))
    for code in codes:
        num_kinds = int(code.max()) + 1
        if num_kinds < 2:
            continue
        counts = np.bincount(code, minlength=num_kinds)
        one_hot = np.eye(num_kinds, dtype=np.float32)[code]
        drafted = is_drafted_SD.astype(np.float32) @ one_hot
        expected = counts * share
        total += ((drafted - expected) ** 2 / (expected * (1 - share))).sum(axis=1) / (
            num_kinds - 1
        )

    return total


def _undecided(why: str) -> RuleResult:
    return RuleResult(
        rule="losslessness", verdict=Verdict.INCONCLUSIVE, value=None, threshold=None, detail=why
    )


def _words(report: AcceptanceReport, judged: JudgedOutputs, *, level: float) -> str:
    """The candidate's figures, the control's, and what was beyond it."""
    control = matched_control(report.self_comparisons)
    largest = max(map(margin_of, control.divergences.values()), default=0.0)
    moved = max(one.max_gap_change_nats for one in report.self_comparisons)
    words = [
        f"{len(report.divergences)} of {report.num_compared_outputs} outputs part from the "
        "plain engine's;"
        f" its own part in {len(control.divergences)} of {control.num_compared} at"
        f" {control.num_in_flight} in flight (p {judged.share_p_value:.2g}, level {level:.2g})",
        f"its margins there were at most {largest:.3f} nats (p of larger ones "
        f"{judged.margins_p_value:.2g}), rounding"
        f" moved its gaps by up to {moved:.3f}",
    ]

    if judged.beyond:
        name, one = max(judged.beyond.items(), key=lambda item: margin_of(item[1]))
        size = "an answer cut short" if one.margin_nats is None else f"{one.margin_nats:.2f} nats"
        least = "at least " if one.is_lower_bound else ""
        words.append(
            f"{len(judged.beyond)} beyond rounding, the largest {least}{size} at token "
            f"{one.position + 1} of {name}"
        )

    return "; ".join(words)
