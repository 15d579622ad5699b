"""The gate: its statistics on simulated gates whose truth is known, then its measurement on real
engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from components.contracts import Verdict
from components.evaluation.rules.looks import at_look
from components.evaluation.statistics.bootstrap import (
    bootstrap_ratio,
    bootstrap_relative_difference,
)
from components.evaluation.statistics.estimate import Estimate, threshold_verdict
from components.evaluation.statistics.ratios import (
    estimate_ratio,
    estimate_relative_difference,
    non_inferiority_verdicts,
)
from components.settings import GateSettings, load_recipe
from tests.benchmarks.gate_engines import engine_figures
from tests.benchmarks.loop_figures import at_least, at_most
from tests.benchmarks.run import Figure
from tests.benchmarks.simulated_gates import (
    KINDS,
    Arms,
    World,
    shift_for,
    simulate,
    true_difference,
    true_length,
)
from tests.benchmarks.simulated_looks import look_figures, speed_figures
from tests.benchmarks.simulated_outputs import output_figures

NUM_GATES = 5_000
"""2,000 leave a standard error of 0.5 points in a coverage; these 0.3."""
NUM_CLAIM_GATES = 10_000
"""Rates of one to three per cent need more gates than coverage does: a standard error of 0.1 to
0.15 points.
"""
NUM_BOOTSTRAPPED, RESAMPLES = 400, 800
OFFSETS = {"mt_bench": -0.5, "humaneval": -0.2, "gsm_symbolic": 0.2, "conversations": 0.4}
"""Slices differ in how easy they are; overall figures must not depend on it."""
MARGIN = 0.05


def run() -> list[Figure]:
    """All figures of evaluation; the first ones need no engine."""
    sizes = load_recipe("demo").evaluation.slices
    return [
        *(figure for kind in KINDS for figure in coverage(kind, sizes)),
        *(figure for kind in KINDS for figure in claims(kind, sizes)),
        *powers(sizes),
        *output_figures(sum(sizes.values())),
        *look_figures(sum(sizes.values())),
        *speed_figures(),
        *engine_figures(),
    ]


def coverage(kind: str, sizes: dict[str, int]) -> list[Figure]:
    """Share of simulated gates whose 95 % interval holds the truth: per slice of 8 and 16 prompts,
    and overall.

    Slices of one size count together. BCa's share is told beside it, of both kinds of intervals
    together.
    """
    worlds = {name: World(kind, OFFSETS[name], shift=0.1) for name in sizes}
    measured = {
        name: simulate(worlds[name], (NUM_GATES, sizes[name]), _generator(kind, name))
        for name in sizes
    }
    figures = []
    for prompts in sorted(set(sizes.values())):
        names = [name for name in sizes if sizes[name] == prompts]
        shares = [_coverage_of([worlds[name]], [prompts], [measured[name]]) for name in names]
        for what in ("difference", "length"):
            mean = float(np.mean([share[what] for share in shares]))
            figures.append(_within(f"coverage_{what}_{kind}_slices_of_{prompts}", mean))
        bca = float(np.mean([share["bca"] for share in shares]))
        figures.append(_told(f"coverage_bca_{kind}_slices_of_{prompts}", bca, "%"))
    whole = _coverage_of(list(worlds.values()), list(sizes.values()), list(measured.values()))
    total = sum(sizes.values())
    for what in ("difference", "length"):
        figures.append(_within(f"coverage_{what}_{kind}_overall_{total}", whole[what]))
    figures.append(_told(f"coverage_bca_{kind}_overall_{total}", whole["bca"], "%"))
    return figures


def _coverage_of(worlds: list[World], sizes: list[int], slices: list[Arms]) -> dict[str, float]:
    difference, length = true_difference(worlds, sizes), true_length(worlds, sizes)
    strata = [str(index) for index, size in enumerate(sizes) for _ in range(size)]
    gates = _joined(slices)
    hits = {"difference": 0, "length": 0}
    for gate in range(NUM_GATES):
        arms = [array[gate] for array in gates]
        hits["difference"] += _holds(estimate_relative_difference(*arms, strata=strata), difference)
        hits["length"] += _holds(
            estimate_ratio(arms[0], arms[1], origin=1.0, strata=strata), length
        )
    bca = 0
    for gate in range(NUM_BOOTSTRAPPED):
        arms = [array[gate] for array in gates]
        for interval, true in (
            (
                bootstrap_relative_difference(
                    *arms, num_samples=RESAMPLES, seed=gate, strata=strata
                ),
                difference,
            ),
            (
                bootstrap_ratio(arms[0], arms[1], num_samples=RESAMPLES, seed=gate, strata=strata),
                length,
            ),
        ):
            bca += interval is not None and interval[0] <= true <= interval[1]
    shares = {what: 100 * count / NUM_GATES for what, count in hits.items()}
    return {**shares, "bca": 100 * bca / (2 * NUM_BOOTSTRAPPED)}


def claims(kind: str, sizes: dict[str, int]) -> list[Figure]:
    """How often wrong claims are made: of a drafter 5 % worse on one slice of five, and of an equal
    one.

    The worse slice is one of the smallest or one of the largest; the margin is 5 %, so that drafter
    is just outside.
    """
    settings = GateSettings(non_inferiority_margin=MARGIN)
    five = [*sizes.values(), max(sizes.values())]
    worse = World(kind, shift=shift_for(kind, -MARGIN))
    equal = World(kind, shift=shift_for(kind, 0.0))
    figures = []
    # With eight times the prompts the four good slices hardly stand in the way of a pass.
    for factor in (
        1,
        8,
    ):
        counts = [count * factor for count in five]
        rates = [_false_pass(worse, equal, counts, index, settings) for index in (1, 0)]
        figures.append(at_most(f"false_pass_5_percent_worse_{kind}_x{factor}", max(rates), 1, "%"))
    total = [equal] * len(sizes), list(sizes.values())
    superior, failed = _claims_of_equal(*total, settings)
    figures.append(at_most(f"false_superior_of_equal_{kind}", superior, 2.5, "%"))
    figures.append(at_most(f"false_fail_of_equal_{kind}", failed, 2.5, "%"))
    return figures


def _false_pass(
    worse: World, equal: World, counts: list[int], index: int, settings: GateSettings
) -> float:
    passes, done = 0, 0
    while done < NUM_CLAIM_GATES:
        chunk = min(1_000, NUM_CLAIM_GATES - done)
        generator = _generator(worse.kind, index, counts[0], done)
        slices = [
            simulate(worse if k == index else equal, (chunk, n), generator)
            for k, n in enumerate(counts)
        ]
        for gate in range(chunk):
            # The worse slice first: where it does not pass, the others need no estimate.
            first = estimate_relative_difference(*(array[gate] for array in slices[index]))
            if first is None or first.p_above(-MARGIN) > settings.non_inferiority_alpha:
                continue
            estimates = {
                str(k): estimate_relative_difference(*(array[gate] for array in arms))
                for k, arms in enumerate(slices)
            }
            passes += set(_verdicts(estimates, settings)) == {Verdict.PASS}
        done += chunk
    return 100 * passes / NUM_CLAIM_GATES


def _claims_of_equal(
    worlds: list[World], sizes: list[int], settings: GateSettings
) -> tuple[float, float]:
    """Per cent of gates that claim superiority overall, and that fail some slice, of a drafter
    equal on all.
    """
    strata = [str(index) for index, size in enumerate(sizes) for _ in range(size)]
    bounds = np.cumsum([0, *sizes])
    superior, failed = 0, 0
    generator = _generator(worlds[0].kind, "equal")
    gates = _joined(
        [simulate(w, (NUM_CLAIM_GATES, n), generator) for w, n in zip(worlds, sizes, strict=True)]
    )
    for gate in range(NUM_CLAIM_GATES):
        arms = [array[gate] for array in gates]
        whole = estimate_relative_difference(*arms, strata=strata)
        superior += threshold_verdict(whole, 0.0, alpha=settings.alpha) is Verdict.PASS
        estimates = {
            str(k): estimate_relative_difference(*(array[low:high] for array in arms))
            for k, (low, high) in enumerate(pairwise(bounds))
        }
        failed += Verdict.FAIL in _verdicts(estimates, settings)
    return 100 * superior / NUM_CLAIM_GATES, 100 * failed / NUM_CLAIM_GATES


def powers(sizes: dict[str, int]) -> list[Figure]:
    """Chance that a true +5 % is claimed superior, with the demo's prompts doubled; else the count
    that reaches 0.9.

    The drafters differ as demo drafters of unlike training do (noise 0.4), the worst case of those
    measured. Beside the whole level, what one look has: the first one's, and that of two, the
    second after as many prompts again.
    """
    settings = GateSettings()
    figures = []
    for kind in KINDS:
        worlds = [World(kind, shift=shift_for(kind, MARGIN, 0.4), noise=0.4)] * len(sizes)
        doubled = [2 * size for size in sizes.values()]
        name = f"power_true_plus_5_percent_{kind}_{sum(doubled)}_prompts"
        figures.append(at_least(name, _power(worlds, doubled, settings), 0.9, "of_gates"))
        if not figures[-1].ok:
            factor = 2.0
            while _power(worlds, [round(factor * size) for size in sizes.values()], settings) < 0.9:
                factor += 0.5
            count = sum(round(factor * size) for size in sizes.values())
            figures.append(_told(f"prompts_for_power_0.9_{kind}", count, "prompts"))
        first, second = _power_of_looks(worlds, doubled, settings)
        figures.append(_told(f"power_first_look_{kind}_{sum(doubled)}_prompts", first, "of_gates"))
        figures.append(
            at_least(f"power_two_looks_{kind}_{2 * sum(doubled)}_prompts", second, 0.9, "of_gates")
        )
    return figures


def _power_of_looks(
    worlds: list[World], sizes: list[int], settings: GateSettings
) -> tuple[float, float]:
    """Share of gates that claim superiority at their first look, and at their first or second."""
    strata = [str(index) for index, size in enumerate(sizes) for _ in range(size)]
    generator = _generator(worlds[0].kind, "looks", sum(sizes))
    halves = [
        _joined(
            [simulate(w, (NUM_GATES, n), generator) for w, n in zip(worlds, sizes, strict=True)]
        )
        for _ in range(2)
    ]
    won = [0, 0]
    for gate in range(NUM_GATES):
        arms = [[array[gate] for array in half] for half in halves]
        both = [np.concatenate(pair) for pair in zip(*arms, strict=True)]
        verdicts = [
            threshold_verdict(
                estimate_relative_difference(*seen, strata=strata * look),
                0.0,
                alpha=at_look(settings, look).alpha,
            )
            for look, seen in ((1, arms[0]), (2, both))
        ]
        won[0] += verdicts[0] is Verdict.PASS
        won[1] += Verdict.PASS in verdicts
    return won[0] / NUM_GATES, won[1] / NUM_GATES


def _power(worlds: list[World], sizes: list[int], settings: GateSettings) -> float:
    strata = [str(index) for index, size in enumerate(sizes) for _ in range(size)]
    generator = _generator(worlds[0].kind, "power", sum(sizes))
    gates = _joined(
        [simulate(w, (NUM_GATES, n), generator) for w, n in zip(worlds, sizes, strict=True)]
    )
    won = [
        threshold_verdict(
            estimate_relative_difference(*(array[gate] for array in gates), strata=strata),
            0.0,
            alpha=settings.alpha,
        )
        is Verdict.PASS
        for gate in range(NUM_GATES)
    ]
    return sum(won) / NUM_GATES


def _verdicts(estimates: dict[str, Estimate | None], settings: GateSettings) -> list[Verdict]:
    return list(
        non_inferiority_verdicts(
            estimates, MARGIN, alpha_pass=settings.non_inferiority_alpha, alpha_fail=settings.alpha
        ).values()
    )


def _joined(slices: Sequence[Arms]) -> list[np.ndarray]:
    return [np.concatenate([arms[k] for arms in slices], axis=1) for k in range(4)]


def _holds(estimate: Estimate | None, true: float) -> bool:
    if estimate is None:
        return False
    low, high = estimate.interval()
    return low <= true <= high


def _within(name: str, value: float) -> Figure:
    return Figure(name=name, value=value, unit="%", goal="93..97", ok=93 <= value <= 97)


def _told(name: str, value: float, unit: str) -> Figure:
    return Figure(name=name, value=value, unit=unit, goal="-", ok=True)


def _generator(*parts: object) -> np.random.Generator:
    """Of its own for each simulation, the same in every run."""
    return np.random.default_rng(
        [sum(map(ord, str(part))) * (index + 1) for index, part in enumerate(parts)]
    )
