"""The load of a canary's steps follows the candidate's schedule."""

from __future__ import annotations

import pytest

from components.contracts import ScheduleRow
from components.serving.rollout.rollout import _load
from components.settings import CanarySettings

SETTINGS = CanarySettings(requests_in_flight=4)


@pytest.mark.parametrize(
    ("schedule", "load"),
    [
        ((), 4),
        (((1, 64, 4),), 4),
        (((1, 1, 4), (2, 64, 0)), 1),
        (((1, 2, 4), (3, 3, 1), (4, 64, 0)), 3),
        (((1, 64, 0),), 4),
        (((1, 4, 0), (5, 64, 2)), 4),
    ],
)
def test_last_step_runs_where_the_schedule_drafts(
    schedule: tuple[tuple[int, int, int], ...], load: int
) -> None:
    rows = tuple(ScheduleRow(*row) for row in schedule)
    assert _load(SETTINGS, rows, 100) == load
    assert _load(SETTINGS, rows, 50) == 4
