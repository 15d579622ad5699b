"""How many draft tokens at which load: the schedule that follows from measured speed, and where
even that loses.

vLLM takes it as `num_speculative_tokens_per_batch_size`, rows of (from, to, K).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from components.contracts import (
    AcceptanceReport,
    Arm,
    Schedule,
    ScheduleRow,
    SpeedPoint,
    draft_tokens_at,
)
from components.evaluation.speed import speedups

MIN_SHIPPED_RATIO = 0.95
"""Of no draft's throughput: what a shipped schedule must keep at every load, or say above which it
does not.
"""

MIN_GAIN = 0.02
"""A shorter draft is taken where it is this much faster: the medians of a few rounds are no closer
than that.
"""

Speed = Mapping[str, Sequence[SpeedPoint]]
Ratios = Mapping[int, Mapping[int, float]]
"""Throughput over no draft, by number of draft tokens K and requests in flight."""


def ratios_by_length(
    speed: Speed, num_draft_tokens: int, shorter: Mapping[int, Speed] | None = None
) -> dict[int, dict[int, float]]:
    """Throughput of the candidate over no draft by K and load.

    Args:
        speed: by arm, with all `num_draft_tokens`.
        num_draft_tokens: K of the drafter's block.
        shorter: by fewer draft tokens, speed by arm as measured with them, no draft in turns with
            it.
    """
    return {
        num_draft_tokens: speedups(speed),
        **{length: speedups(one) for length, one in (shorter or {}).items()},
    }


def reported_ratios(report: AcceptanceReport) -> dict[int, dict[int, float]]:
    """`ratios_by_length` of what a report holds."""
    return ratios_by_length(
        {arm: one.speed for arm, one in report.arms.items()},
        len(report.arms[Arm.CANDIDATE].acceptance_by_position),
        {
            one.num_draft_tokens: {Arm.CANDIDATE: one.arm.speed, Arm.NO_DRAFT: one.no_draft_speed}
            for one in report.draft_lengths
        },
    )


def choose_schedule(ratios: Ratios, *, max_requests: int = 64) -> Schedule:
    """The schedule from the measured break-even: fewer draft tokens as the load grows, then none.

    At each measured load the fastest K of those not above the last load's is taken, a shorter one
    where it is faster by `MIN_GAIN`. From the first load at which none is at least as fast as no
    draft, K is 0. Between two measured loads the smaller one is trusted up to itself and the larger
    one from there on: fewer drafts are only slower, so the schedule errs to the side of plain
    decoding.

    Args:
        ratios: as `ratios_by_length`; a K without measured speed is left out.
        max_requests: end of the last row.

    Returns:
        Rows without gap or overlap from 1 on; empty (always K) without any measured speed-up.
    """
    measured = {length: by_load for length, by_load in ratios.items() if by_load}
    if not measured:
        return ()

    loads = sorted(measured[max(measured)])
    lengths = []
    longest = max(measured)
    for load in loads:
        longest = _fastest(measured, load, longest) if longest else 0
        lengths.append(longest)

    rows: list[ScheduleRow] = []
    first = 1
    for index, (load, length) in enumerate(zip(loads, lengths, strict=True)):
        is_last = index == len(loads) - 1
        if not is_last and lengths[index + 1] == length:
            continue
        if length == 0 or is_last:
            rows.append(ScheduleRow(first, max(load, first, max_requests), length))
            break
        rows.append(ScheduleRow(first, load, length))
        first = load + 1

    return tuple(rows)


def _fastest(measured: Ratios, load: int, longest: int) -> int:
    """The K <= `longest` to draft with at `load`; 0 where no draft is faster than any."""
    chosen, best = 0, 1.0
    for length in sorted(measured, reverse=True):
        ratio = measured[length].get(load, 0.0)
        needed = best + MIN_GAIN if chosen else best
        if length <= longest and ratio >= needed:
            chosen, best = length, ratio
    return chosen


def load_limit(
    speed: Speed, ratios: Ratios, schedule: Schedule, *, min_ratio: float = MIN_SHIPPED_RATIO
) -> int | None:
    """Requests in flight above which the drafter should not be loaded at all; None when there is no
    such load.

    A schedule with K = 0 does not make a drafter free: it still reads every token to keep its own
    cache. So the shipped schedule is taken at its word where it was measured itself (arm
    'scheduled'), else only where it drafts as was measured; a load at which it does not draft and
    was not measured counts as one to take the drafter out at.

    Args:
        speed: by arm.
        ratios: as `ratios_by_length`.
        schedule: of `choose_schedule`.
        min_ratio: of no draft's throughput.

    Returns:
        The largest measured load up to which the schedule is never below `min_ratio` of no draft
        (0: not even one request), or None when that holds at every measured load, or no speed was
        measured.
    """
    if not schedule:
        return None
    loads = sorted({load for by_load in ratios.values() for load in by_load})
    shipped = speedups(speed, arm=Arm.SCHEDULED, over=Arm.NO_DRAFT_BESIDE) or {
        load: ratios.get(draft_tokens_at(schedule, load), {}).get(load, 0.0) for load in loads
    }
    limit = 0
    for load in loads:
        if shipped.get(load, 0.0) < min_ratio:
            return limit
        limit = load
    return None
