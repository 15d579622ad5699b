"""Derived figures: orchestration share, speed-up, break-even."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from components.contracts import ScheduleRow, StageTiming
from components.reporting.gate.acceptance_plots import break_even
from components.reporting.report import orchestration_share
from components.reporting.tables import duration, schedule_text

START = datetime(2026, 1, 1, tzinfo=UTC)


def stage(start_s: float, duration_s: float) -> StageTiming:
    return StageTiming(
        stage="s", started_at=START + timedelta(seconds=start_s), duration_s=duration_s
    )


@pytest.mark.parametrize(
    ("stages", "share"),
    [
        ([stage(0, 50), stage(50, 50)], 0.0),
        ([stage(0, 40), stage(50, 40)], 0.2),
        ([stage(0, 60), stage(20, 20), stage(50, 40)], 0.1),  # overlaps count once
        ([stage(50, 40), stage(0, 40)], 0.2),  # any order
        ([], 1.0),
        ([stage(0, 200)], 0.0),
    ],
)
def test_orchestration_share(stages: list[StageTiming], share: float) -> None:
    assert orchestration_share(stages, 100) == pytest.approx(share)


def test_orchestration_share_of_nothing() -> None:
    assert orchestration_share([], 0) == 0.0


def test_break_even_lies_between_the_points_around_it() -> None:
    assert break_even({1: 1.5, 4: 0.5}) == pytest.approx(2.0)
    assert break_even({1: 1.4, 4: 1.0, 8: 0.7}) == pytest.approx(4.0)
    assert break_even({1: 1.4, 8: 1.1}) is None
    assert break_even({1: 0.9, 8: 0.5}) is None
    assert break_even({}) is None


def test_words_for_people() -> None:
    assert duration(4.21) == "4.2 s"
    assert duration(185) == "3 min 05 s"
    assert schedule_text((ScheduleRow(1, 4, 4), ScheduleRow(5, 64, 0))) == "1-4: 4, 5-64: 0"
    assert schedule_text(()) == "always the same"
