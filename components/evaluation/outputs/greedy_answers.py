"""Two greedy answers to one prompt, token by token: where they part first, and how far the gaps
moved. Pure.

**Why gaps.** A greedy token is the largest logit. Two computations of the same logits that round
differently (another batch shape, another kernel) choose different tokens only where the gap between
the best two is no larger than what rounding moves it by. So the plain engine's own gap at the first
difference says whether rounding can explain it; and the change of the gaps between two runs of the
plain engine, at *every* position of equal context and not only where the token flipped, says how
much rounding moves gaps on this machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from components.contracts import Divergence, SelfComparison

NUM_TOP_LOGPROBS = 8
"""Asked of the plain engine: the other answer's token is nearly always among them where rounding
chose it.
"""

NEAR_GAP_NATS = 2.0
"""Gaps wider than this do not count for how much rounding moves a gap: no rounding closes them, and
they move by more than those that it can close (a logit's rounding grows with its distance from the
best).
"""

TopLogprobs = tuple[tuple[int, float], ...]
"""(token id, log-probability) at one position, the most probable first."""


@dataclass(frozen=True)
class GreedyAnswer:
    """Token ids of an answer, an end token included, and per position the best tokens where they
    were asked for.
    """

    token_ids: tuple[int, ...]
    top: tuple[TopLogprobs, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 (hex) of the token ids."""
        return digest_tokens(self.token_ids)


def digest_tokens(token_ids: Sequence[int]) -> str:
    """sha256 (hex) of token ids in order."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()


def divergence(plain: GreedyAnswer, other: GreedyAnswer) -> Divergence | None:
    """Where `other` parts from `plain` first, and `plain`'s margin there; None for equal answers.

    An answer that ends where the other goes on parts there, without a margin: an end token is a
    token like any other, so an answer that ends without one was cut.
    """
    pairs = zip_longest(plain.token_ids, other.token_ids)
    first = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if first is None:
        return None
    if first >= min(len(plain.token_ids), len(other.token_ids)) or first >= len(plain.top):
        return Divergence(position=first, margin_nats=None)
    told = dict(plain.top[first])
    best = told.get(plain.token_ids[first], plain.top[first][0][1])
    theirs = told.get(other.token_ids[first])
    least = min(told.values())
    margin = best - (least if theirs is None else theirs)
    return Divergence(position=first, margin_nats=max(0.0, margin), is_lower_bound=theirs is None)


def gap_changes(plain: GreedyAnswer, again: GreedyAnswer) -> Iterator[float]:
    """Changes, in nats, of the gap between `plain`'s two best tokens at every position of equal
    context.

    Only gaps up to `NEAR_GAP_NATS` count, and positions at which `again` tells both tokens too.
    """
    for place in range(min(len(plain.top), len(again.top))):
        (first, first_logprob), (second, second_logprob) = plain.top[place][:2]
        told = dict(again.top[place])
        gap = first_logprob - second_logprob
        if gap <= NEAR_GAP_NATS and first in told and second in told:
            yield abs(gap - (told[first] - told[second]))
        if plain.token_ids[place] != again.token_ids[place]:
            return


def compare_with_itself(
    plain: Mapping[str, GreedyAnswer], again: Mapping[str, GreedyAnswer], *, num_in_flight: int
) -> SelfComparison:
    """The plain engine's answers against its own at `num_in_flight`, over the prompts that both
    hold.
    """
    common = sorted(plain.keys() & again.keys())
    changes = [change for name in common for change in gap_changes(plain[name], again[name])]
    return SelfComparison(
        num_in_flight=num_in_flight,
        digests={name: again[name].digest for name in common},
        divergences=divergences({name: plain[name] for name in common}, again),
        num_gaps=len(changes),
        max_gap_change_nats=max(changes, default=0.0),
    )


def divergences(
    plain: Mapping[str, GreedyAnswer], other: Mapping[str, GreedyAnswer]
) -> dict[str, Divergence]:
    """By prompt id, where `other` parts from `plain`; prompts of one of them alone are left out."""
    found = {
        name: divergence(plain[name], other[name]) for name in sorted(plain.keys() & other.keys())
    }
    return {name: one for name, one in found.items() if one is not None}
