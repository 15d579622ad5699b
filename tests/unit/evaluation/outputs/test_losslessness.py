"""Outputs with a drafter are the target's own: rules with the machine as its own control, and their
power.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from components.contracts import Divergence, SampledOutputs, SelfComparison, Verdict
from components.evaluation.outputs.losslessness import (
    judge_outputs,
    losslessness,
    margins_p_value,
    rounding_floor_nats,
    sampled_losslessness,
    share_p_value,
    two_sample_p_value,
)
from components.settings import GateSettings
from tests.benchmarks.simulated_outputs import Machine, failed_share

SETTINGS = GateSettings()


def itself(
    parted: Mapping[str, float] = {}, *, num: int = 20, moved: float = 0.1, gaps: int = 900
) -> SelfComparison:
    return SelfComparison(
        num_in_flight=20,
        digests={str(n): "x" for n in range(num)},
        divergences={
            name: Divergence(position=3, margin_nats=margin) for name, margin in parted.items()
        },
        num_gaps=gaps,
        max_gap_change_nats=moved,
    )


def verdict(
    margins: Mapping[str, float | None], control: SelfComparison, *, dtype: str = "bfloat16"
) -> Verdict:
    parted = {name: Divergence(position=1, margin_nats=margin) for name, margin in margins.items()}
    return judge_outputs(parted, [control], dtype=dtype, alpha=0.005).verdict


def test_two_steps_of_the_dtype_at_a_logit_of_sixteen() -> None:
    assert rounding_floor_nats("bfloat16") == 0.25  # 2 x 16 x 2^-7
    assert rounding_floor_nats("float16") == 0.03125  # 2 x 16 x 2^-10
    assert rounding_floor_nats("float32") == 1e-3
    assert rounding_floor_nats("auto") == rounding_floor_nats("bfloat16")


def test_a_near_tie_is_rounding_even_where_the_machine_agrees_with_itself() -> None:
    assert verdict({"1": 0.2}, itself()) is Verdict.PASS
    # Twice 0.1, which its gaps moved by.
    assert verdict({"1": 0.2}, itself(), dtype="float32") is Verdict.PASS
    assert verdict({"1": 0.2}, itself(moved=0.05), dtype="float32") is Verdict.FAIL


@pytest.mark.parametrize(("margin", "said"), [(0.3, "pass"), (0.41, "fail"), (None, "fail")])
def test_one_margin_beyond_twice_what_rounding_moved_fails(margin: float | None, said: str) -> None:
    assert verdict({"1": margin}, itself(moved=0.2)) == said


def test_more_outputs_part_than_the_machines_own() -> None:
    """Of ten that part in one of the two only, all are the drafter's: p = 2^-10, below 0.005 / 3;
    of eight, 2^-8.
    """
    ties = {str(n): 0.1 for n in range(10)}
    assert share_p_value(set(ties), itself()) == pytest.approx(2**-10)
    assert verdict(ties, itself()) is Verdict.FAIL
    assert verdict(dict(list(ties.items())[:8]), itself()) is Verdict.PASS
    # The same ten, on a machine whose own outputs part there as well, and on one where ten others
    # do.
    assert share_p_value(set(ties), itself(ties)) == 1.0
    assert verdict(ties, itself(ties)) is Verdict.PASS
    assert verdict(ties, itself({str(n): 0.1 for n in range(10, 20)})) is Verdict.PASS


def test_larger_margins_than_the_machines_own() -> None:
    """Six of the drafter's above six of its own: one of 924 orders. Both within reach, and as many
    as its own.
    """
    names = [str(n) for n in range(6)]
    control = itself({name: 0.1 + 0.01 * n for n, name in enumerate(names)}, moved=1.0)
    larger = {name: 0.5 + 0.01 * n for n, name in enumerate(names)}
    parted = {name: Divergence(position=1, margin_nats=margin) for name, margin in larger.items()}
    assert margins_p_value(parted.values(), control.divergences.values()) == pytest.approx(1 / 924)
    assert verdict(larger, control) is Verdict.FAIL
    assert verdict(dict(list(larger.items())[:3]), control) is Verdict.PASS
    assert margins_p_value([], control.divergences.values()) == 1.0


def test_few_gaps_excuse_nothing_and_show_nothing() -> None:
    assert verdict({}, itself(gaps=199)) is Verdict.INCONCLUSIVE
    assert verdict({"1": 9.0}, itself(gaps=199)) is Verdict.FAIL


def test_what_was_not_measured_is_undecided(report: Any, arm: Any, measurement: Any) -> None:
    ours = [
        measurement(f"a/{n}", histogram=(3, 1), output="other" if n == 0 else "same")
        for n in range(4)
    ]
    theirs = [measurement(f"a/{n}") for n in range(4)]
    arms = (arm("candidate", ours, num_draft_tokens=1), arm("no_draft", theirs))
    parted = {"a/0": Divergence(position=2, margin_nats=0.1)}
    told = losslessness(report(*arms, divergences=parted), SETTINGS)
    assert told is not None and told.verdict is Verdict.PASS
    assert (told.value, told.threshold) == (0.1, 0.25)
    assert (
        "1 of 4 outputs part" in told.detail
        and "its own part in 0 of 4 at 20 in flight" in told.detail
    )
    for missing in ({}, {"divergences": parted, "itself": []}):
        told = losslessness(report(*arms, **missing), SETTINGS)
        assert told is not None and told.verdict is Verdict.INCONCLUSIVE
    assert losslessness(report(*arms, temperature=1.0), SETTINGS) is None


@pytest.mark.parametrize("agreement", [1.0, 0.75, 0.45])
def test_a_right_engine_passes_and_one_that_keeps_wrong_drafts_fails(agreement: float) -> None:
    """A small run of the simulation that `make bench NAME=evaluation` runs at full size."""
    right = failed_share(Machine(agreement), num_gates=300, num_prompts=48, alpha=0.005)
    wrong = failed_share(
        Machine(agreement), num_gates=100, num_prompts=48, alpha=0.005, wrong_rate=1 / 50
    )
    assert right <= 4 / 300  # 0.5 % of 300 are 1.5: five or more would come up once in fifty runs
    assert wrong >= 0.99


def draws(
    shares: list[float], num: int, generator: np.random.Generator
) -> tuple[tuple[int, ...], ...]:
    first = generator.choice(len(shares), num, p=shares)
    second = generator.choice(len(shares), num, p=shares)
    return tuple((int(a), int(b)) for a, b in zip(first, second, strict=True))


def sampled(
    ours: list[float], theirs: list[float], *, num: int = 128, seed: int = 0
) -> SampledOutputs:
    generator = np.random.default_rng(seed)
    names = ("a/1", "b/1")
    return SampledOutputs(
        temperature=1.0,
        plain={name: draws(theirs, num, generator) for name in names},
        drafted={name: draws(ours, num, generator) for name in names},
    )


def test_draws_of_one_distribution_pass_and_of_two_fail() -> None:
    even, uneven = [0.25, 0.25, 0.25, 0.25], [0.45, 0.25, 0.15, 0.15]
    assert sampled_losslessness(sampled(even, even), SETTINGS).verdict is Verdict.PASS
    told = sampled_losslessness(sampled(uneven, even), SETTINGS)
    assert told.verdict is Verdict.FAIL and told.value is not None and told.value <= 0.005


def test_the_permutation_p_is_uniform_under_equality() -> None:
    """20 pairs of samples of one distribution: the mean p is 0.5 within four standard errors of 20
    uniform ones.
    """
    shares = [0.6, 0.2, 0.1, 0.05, 0.05]
    values = [
        two_sample_p_value(
            sampled(shares, shares, num=60, seed=seed), seed=seed, num_permutations=199
        )
        for seed in range(20)
    ]
    assert abs(np.mean(values) - 0.5) < 4 * math.sqrt(1 / 12 / 20)


def test_no_draws_say_nothing() -> None:
    assert two_sample_p_value(SampledOutputs(temperature=1.0, plain={}, drafted={}), seed=0) == 1.0
