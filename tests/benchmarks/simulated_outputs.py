"""Simulated greedy outputs of engines that round, and of one that also accepts wrong drafts: what
the gate must tell.

A token's gap to the second best is nearly uniform next to zero; a computation moves it by noise of
its own; where the noise of two computations differs by more than the gap, their outputs part. An
engine that keeps a wrong draft parts at a gap of its own: that of the drafter's token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from components.contracts import Divergence, SelfComparison, Verdict
from components.evaluation.outputs.greedy_answers import NEAR_GAP_NATS
from components.evaluation.outputs.losslessness import judge_outputs
from components.settings import GateSettings
from tests.benchmarks.loop_figures import at_least, at_most
from tests.benchmarks.run import Figure

NUM_TOKENS = 64
GAPS_PER_NAT = 0.08
"""Density of gaps next to zero: about one token in twelve has a gap below one nat."""
STEPS_PER_ANSWER = 40
MEAN_WRONG_MARGIN_NATS = 2.0
"""Of a drafter's wrong tokens: they are plausible ones."""


@dataclass(frozen=True)
class Machine:
    """How an engine's answers agree with its own: share of answers of `NUM_TOKENS` tokens that are
    equal.
    """

    agreement: float
    tails: str = "normal"

    @property
    def noise_nats(self) -> float:
        """Spread of one computation's noise on a gap, from the agreement.

        Outputs part at a token with probability density x E[max(0, difference of two noises)], and
        the mean positive part of a normal difference of spread sqrt(2) s is sqrt(2) s / sqrt(2 pi).
        """
        parting = 1 - self.agreement ** (1 / NUM_TOKENS)
        return parting / GAPS_PER_NAT * float(np.sqrt(np.pi))

    def noise(self, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
        """Noise of one computation on each gap, nats."""
        if self.tails == "laplace":
            return generator.laplace(0.0, self.noise_nats / np.sqrt(2), shape)
        return generator.normal(0.0, self.noise_nats, shape)


NUM_GATES, NUM_WRONG_GATES = 4_000, 1_000


def output_figures(num_prompts: int) -> list[Figure]:
    """How often a right engine fails, and one that keeps 1 wrong draft in 50, on machines that
    agree with themselves on all, three quarters and not half of their outputs.
    """
    alpha = GateSettings().losslessness_alpha
    figures = []
    for tails in ("normal", "laplace"):
        for agreement in (1.0, 0.75, 0.45):
            machine = Machine(agreement, tails)
            name = f"{tails}_{agreement:g}_agreement"
            right = failed_share(
                machine, num_gates=NUM_GATES, num_prompts=num_prompts, alpha=alpha, seed=1
            )
            wrong = failed_share(
                machine,
                num_gates=NUM_WRONG_GATES,
                num_prompts=num_prompts,
                alpha=alpha,
                wrong_rate=1 / 50,
                seed=2,
            )
            figures.append(at_most(f"lossless_fails_{name}", 100 * right, 0.5, "%"))
            figures.append(at_least(f"one_wrong_in_50_fails_{name}", 100 * wrong, 99, "%"))
    return figures


def failed_share(
    machine: Machine,
    *,
    num_gates: int,
    num_prompts: int,
    alpha: float,
    wrong_rate: float = 0.0,
    seed: int = 0,
) -> float:
    """Share of gates that fail: of a lossless engine, or of one that keeps `wrong_rate` of its
    wrong drafts.
    """
    generator = np.random.default_rng(seed)
    failed = 0
    for _ in range(num_gates):
        gaps = _gaps((num_prompts, NUM_TOKENS), generator)
        plain, *again, drafted = (machine.noise(gaps.shape, generator) for _ in range(4))
        itself = [
            _compared(gaps, plain, noise, load) for noise, load in zip(again, (4, 20), strict=True)
        ]
        parted = _partings(gaps, plain, drafted)
        if wrong_rate:
            parted = _with_wrong_drafts(parted, wrong_rate, num_prompts, generator)
        failed += (
            judge_outputs(parted, itself, dtype="bfloat16", alpha=alpha).verdict is Verdict.FAIL
        )
    return failed / num_gates


def _gaps(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Half of the mass far away, where no rounding reaches."""
    near = generator.random(shape) < GAPS_PER_NAT * NEAR_GAP_NATS
    return np.where(near, generator.random(shape) * NEAR_GAP_NATS, NEAR_GAP_NATS + 1)


def _partings(gaps: np.ndarray, plain: np.ndarray, other: np.ndarray) -> dict[str, Divergence]:
    """By prompt number: the first token at which the other computation chooses the second best.

    The margin is the gap as the plain engine saw it, noise included; where its own noise had turned
    it, the other way.
    """
    flipped = np.sign(gaps + plain) != np.sign(gaps + other)
    found = {}
    for index in np.flatnonzero(flipped.any(axis=1)):
        place = int(flipped[index].argmax())
        found[str(index)] = Divergence(
            position=place, margin_nats=float(abs(gaps[index, place] + plain[index, place]))
        )
    return found


def _compared(gaps: np.ndarray, plain: np.ndarray, again: np.ndarray, load: int) -> SelfComparison:
    parted = _partings(gaps, plain, again)
    seen = np.abs(gaps + plain) <= NEAR_GAP_NATS
    for index, one in parted.items():
        seen[int(index), one.position + 1 :] = False
    changes = np.abs(plain - again)[seen]
    return SelfComparison(
        num_in_flight=load,
        digests={
            str(index): "part" if str(index) in parted else "equal" for index in range(len(gaps))
        },
        divergences=parted,
        num_gaps=int(seen.sum()),
        max_gap_change_nats=float(changes.max()) if len(changes) else 0.0,
    )


def _with_wrong_drafts(
    parted: dict[str, Divergence], rate: float, num_prompts: int, generator: np.random.Generator
) -> dict[str, Divergence]:
    """Each step offers one wrong draft; the first that is kept parts the output, where rounding had
    not before.
    """
    kept = generator.geometric(rate, num_prompts) - 1
    for index in np.flatnonzero(kept < STEPS_PER_ANSWER):
        place = int(kept[index] * NUM_TOKENS / STEPS_PER_ANSWER)
        margin = float(generator.exponential(MEAN_WRONG_MARGIN_NATS))
        if str(index) not in parted or place < parted[str(index)].position:
            parted[str(index)] = Divergence(position=place, margin_nats=margin)
    return parted
