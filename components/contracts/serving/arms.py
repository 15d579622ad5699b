"""What is compared, where it stands in the splitter, and the rows of a speculative schedule."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Arm(StrEnum):
    """What is compared. A rival without a drafter is an arm under its method's name."""

    CANDIDATE = "candidate"
    CHAMPION = "champion"
    NO_DRAFT = "no_draft"
    UNTRAINED = "untrained"
    SCHEDULED = "scheduled"
    """The candidate with the schedule that it would be shipped with."""
    NO_DRAFT_BESIDE = "no_draft_beside"
    """No draft once more, in turns with the scheduled candidate."""


class Slot(StrEnum):
    """A place in the splitter: whatever arm is put there answers its share of the traffic."""

    CANDIDATE = "candidate"
    BASELINE = "baseline"


class ScheduleRow(NamedTuple):
    """From `first` to `last` requests in one batch the engine drafts `num_draft_tokens`."""

    first: int
    last: int
    num_draft_tokens: int


Schedule = tuple[ScheduleRow, ...]
"""Rows without gap or overlap from 1 on; empty: always all of the drafter's tokens."""


def draft_tokens_at(schedule: Sequence[ScheduleRow], num_requests: int) -> int:
    """Draft tokens with that many requests in one batch; beyond the last row its number holds on.

    Args:
        schedule: not empty.
        num_requests: in one batch, from 1 on.
    """
    for row in schedule:
        if row.first <= num_requests <= row.last:
            return row.num_draft_tokens
    return schedule[-1].num_draft_tokens
