"""How far long work is, and how long it took."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from components.contracts.record import Record

Progress = Callable[[str, int, int], None]
"""Called as progress(what, num_done, num_total) by anything longer than ten seconds, at least every
5 s.
"""


def now_utc() -> datetime:
    """Current time, UTC."""
    return datetime.now(UTC)


class StageTiming(Record):
    """Wall time of one stage of the loop."""

    stage: str
    started_at: datetime
    duration_s: float
    num_tokens: int | None = None
