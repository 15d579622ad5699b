"""Simulated served measurements whose truth is known: two drafters on the same prompts, token by
token.

A prompt has a share p of tokens its drafter gets right (beta, log-normal or two kinds of prompts),
the other drafter logit(q) = logit(p) + shift + noise. Every token of the answer has a difficulty in
[0, 1], a drafter gets it right when that is below its share; the two meet the same difficulty at 85
% of the tokens, as two drafters on one text do. A target step accepts the run of right tokens at
its place, at most K, and adds the bonus token; steps follow each other until the answer ends, at
the length limit in two thirds of the prompts.

With noise 0.3 one prompt's paired log difference spreads by 0.06 to 0.10, with 0.4 by 0.07 to 0.13:
pairs of demo drafters spread by 0.04 to 0.07 where trained alike, by 0.11 to 0.13 where one saw
several times the data (docs/lab-notes/gate.md).

Shapes: G gates, P prompts, L tokens of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Arms = tuple[Array, Array, Array, Array]
"""Tokens and steps of drafter a, then of b: [G, P] each, as `estimate_relative_difference` takes
them.
"""

MAX_DRAFT, MAX_TOKENS = 4, 64
SHARED_TOKENS = 0.85
TRUTH_PROMPTS, CHUNK = 400_000, 20_000

KINDS = ("geometric", "heavy_tailed", "bimodal")


@dataclass(frozen=True)
class World:
    """How prompts of one slice are.

    Attributes:
        kind: distribution of a prompt's share of right tokens.
        offset: of the slice, on the logit scale.
        shift: of drafter a against b, on the logit scale.
        noise: spread of that shift over prompts.
    """

    kind: str
    offset: float = 0.0
    shift: float = 0.0
    noise: float = 0.3


def simulate(world: World, shape: tuple[int, int], generator: np.random.Generator) -> Arms:
    """Served measurements of both drafters over `shape` = (G, P) prompts."""
    theirs = np.log(_shares(world.kind, shape, generator))
    theirs = theirs - np.log1p(-np.exp(theirs)) + world.offset
    ours = theirs + world.shift + generator.normal(0.0, world.noise, shape)
    lengths = (
        np.where(
            generator.random(shape) < 2 / 3, MAX_TOKENS, generator.integers(12, MAX_TOKENS, shape)
        )
        - 1
    )
    difficulty = generator.random((*shape, MAX_TOKENS), dtype=np.float32)
    own = generator.random((*shape, MAX_TOKENS), dtype=np.float32)
    is_own = generator.random((*shape, MAX_TOKENS), dtype=np.float32) >= SHARED_TOKENS
    a = _decode(np.where(is_own, own, difficulty) < _sigmoid(ours)[..., None], lengths)
    b = _decode(difficulty < _sigmoid(theirs)[..., None], lengths)
    return (*a, *b)


def _shares(kind: str, shape: tuple[int, int], generator: np.random.Generator) -> Array:
    """Share of tokens a drafter gets right, per prompt, strictly between 0 and 1."""
    if kind == "geometric":
        shares = generator.beta(4, 8, shape)
    elif kind == "heavy_tailed":  # most prompts near nothing, a few nearly always right
        shares = 0.12 * generator.lognormal(0.0, 0.9, shape)
    else:  # half of the prompts easy, half hard
        shares = np.where(
            generator.random(shape) < 0.5,
            generator.beta(30, 12, shape),
            generator.beta(6, 30, shape),
        )
    return np.clip(shares, 1e-3, 0.97)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _decode(is_right: NDArray[np.bool_], lengths: NDArray[np.int64]) -> tuple[Array, Array]:
    """(accepted + steps, steps), [G, P] each, of decoding `lengths` tokens; drafts right at
    `is_right`.
    """
    runs = np.zeros((*is_right.shape[:-1], MAX_TOKENS + 1), dtype=np.int8)
    for place in range(MAX_TOKENS - 1, -1, -1):
        runs[..., place] = np.where(
            is_right[..., place], np.minimum(runs[..., place + 1] + 1, MAX_DRAFT), 0
        )
    place = np.zeros(lengths.shape, dtype=np.int64)
    num, den = np.zeros(lengths.shape), np.zeros(lengths.shape)
    while (live := place < lengths).any():
        committed = (
            np.take_along_axis(runs, np.minimum(place, MAX_TOKENS)[..., None], axis=-1)[..., 0] + 1
        )
        num += np.where(live, committed, 0)
        den += live
        place += np.where(live, committed, 0)
    return num, den


@cache
def truth(world: World) -> tuple[float, float, float, float]:
    """Mean of each array of `Arms` over very many prompts; their ratios are the true values."""
    generator = np.random.default_rng(20_261_130)
    sums = np.zeros(4)
    for _ in range(TRUTH_PROMPTS // CHUNK):
        sums += [float(array.sum()) for array in simulate(world, (1, CHUNK), generator)]
    a, b, c, d = sums / TRUTH_PROMPTS
    return (a, b, c, d)


def true_difference(worlds: list[World], sizes: list[int]) -> float:
    """Relative difference of the acceptance lengths over slices of these sizes."""
    a, b, c, d = (
        sum(n * truth(w)[k] for w, n in zip(worlds, sizes, strict=True)) for k in range(4)
    )
    return (a / b) / (c / d) - 1


def true_length(worlds: list[World], sizes: list[int]) -> float:
    """Drafter a's acceptance length over slices of these sizes."""
    a, b = (sum(n * truth(w)[k] for w, n in zip(worlds, sizes, strict=True)) for k in (0, 1))
    return a / b


@cache
def shift_for(kind: str, difference: float, noise: float = World.noise) -> float:
    """Shift of drafter a that makes its acceptance length this much longer than b's, relative.

    By secants on `truth` itself, whose prompts are the same at every shift: the world that is
    simulated is as far off as asked for to 0.01 %, or a claim at the margin would be tested beside
    it.
    """
    points = [
        (shift, true_difference([World(kind, shift=shift, noise=noise)], [1]))
        for shift in (-0.1, 0.1)
    ]
    while abs(points[-1][1] - difference) > 1e-4:
        (x0, y0), (x1, y1) = points[-2:]
        shift = x1 + (difference - y1) * (x1 - x0) / (y1 - y0)
        points.append((shift, true_difference([World(kind, shift=shift, noise=noise)], [1])))
    return points[-1][0]
