"""The schedule that follows from the break-even, and the load above which even that loses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from components.contracts import ScheduleRow, draft_tokens_at
from components.evaluation.draft_schedule import (
    choose_schedule,
    load_limit,
    ratios_by_length,
)


def limit_of(speed: Mapping[str, Any]) -> int | None:
    ratios = ratios_by_length(speed, 4)
    return load_limit(speed, ratios, choose_schedule(ratios))


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        ({1: 60, 4: 140, 8: 165}, ((1, 4, 4), (5, 64, 0))),
        ({1: 60, 4: 90, 8: 300}, ((1, 1, 4), (2, 64, 0))),
        ({1: 30, 4: 90, 8: 165}, ((1, 64, 0),)),
        ({1: 60, 4: 140, 8: 240}, ((1, 64, 4),)),
        ({}, ()),
    ],
)
def test_schedule_speculates_up_to_the_last_win(
    candidate: dict[int, float],
    expected: tuple[tuple[int, int, int], ...],
    speed_points: Callable[..., Any],
) -> None:
    speed = {
        "candidate": speed_points(candidate),
        "no_draft": speed_points({1: 43, 4: 130, 8: 237}),
    }
    assert choose_schedule(ratios_by_length(speed, 4)) == expected


def test_schedule_is_what_the_engine_accepts(speed_points: Callable[..., Any]) -> None:
    """Rows start at 1, do not overlap and leave no gap, at any break-even and beyond
    `max_requests`.
    """
    for last_win in (1, 2, 64, 100):
        rates = {level: (2.0 if level <= last_win else 0.5) for level in (1, 2, 64, 100, 128)}
        speed = {
            "candidate": speed_points(rates),
            "no_draft": speed_points(dict.fromkeys(rates, 1.0)),
        }
        schedule = choose_schedule(ratios_by_length(speed, 3))
        assert schedule[0][:2] == (1, last_win)
        assert schedule[1][0] == last_win + 1 <= schedule[1][1]


@pytest.mark.parametrize(
    ("rates", "limit"),
    [
        (
            {1: 60, 4: 140, 8: 165},
            4,
        ),  # above 4 the schedule has K = 0, and nobody measured what that costs
        (
            {1: 60, 4: 128, 8: 236},
            1,
        ),  # 0.98x and 1.00x, but the schedule no longer drafts from 2 on
        ({1: 60, 4: 140, 8: 240}, None),
        ({1: 30, 4: 90, 8: 165}, 0),
        ({}, None),
    ],
)
def test_load_above_which_the_drafter_comes_out(
    rates: Any, limit: int | None, speed_points: Any
) -> None:
    speed = {"candidate": speed_points(rates), "no_draft": speed_points({1: 43, 4: 130, 8: 237})}
    assert limit_of(speed) == limit


@pytest.mark.parametrize(
    ("scheduled", "limit"),
    [
        ({1: 60, 4: 125, 8: 230}, None),  # at least 0.95x of no draft at every load
        ({1: 60, 4: 125, 8: 220}, 4),
        ({1: 60, 4: 110, 8: 236}, 1),
    ],
)
def test_a_measured_schedule_is_taken_at_its_word(
    scheduled: Any, limit: int | None, speed_points: Any
) -> None:
    plain = {1: 43, 4: 130, 8: 237}
    speed = {
        "candidate": speed_points({1: 60, 4: 100, 8: 165}),
        "no_draft": speed_points(plain),
        "scheduled": speed_points(scheduled),
        # The machine was a tenth slower by then: only what was measured beside it counts.
        "no_draft_beside": speed_points(plain),
    }
    assert limit_of(speed) == limit
    slower = {level: 1.1 * rate for level, rate in plain.items()}
    assert limit_of(speed | {"no_draft": speed_points(slower)}) == limit


def test_draft_tokens_of_a_load_are_vllms() -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    for schedule in (((1, 4, 3), (5, 64, 0)), ((1, 64, 3),), ((1, 1, 3), (2, 2, 0))):
        by_vllm = build_dynamic_sd_schedule_lookup([list(row) for row in schedule], 100, 3)
        rows = [ScheduleRow(*row) for row in schedule]
        assert [draft_tokens_at(rows, load) for load in range(1, 101)] == by_vllm[1:]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        (
            {4: {1: 1.3, 4: 0.9, 8: 0.7}, 2: {1: 1.25, 4: 1.1, 8: 0.9}},
            ((1, 1, 4), (2, 4, 2), (5, 64, 0)),
        ),
        ({4: {1: 1.3, 4: 1.05}, 2: {1: 1.31, 4: 1.06}}, ((1, 64, 4),)),  # no closer than the noise
        ({4: {1: 0.9, 4: 0.9}, 2: {1: 1.0, 4: 1.1}}, ((1, 64, 2),)),
        (
            {4: {1: 1.0, 4: 1.5}, 2: {1: 1.2, 4: 1.1}},
            ((1, 64, 2),),
        ),  # more load never means more drafts
        (
            {4: {1: 1.3, 4: 1.2}, 2: {}, 1: {1: 1.4}},
            ((1, 1, 1), (2, 64, 0)),
        ),  # unknown of one draft at 4: none
        ({4: {1: 0.9}, 2: {1: 0.8}}, ((1, 64, 0),)),
    ],
)
def test_fewer_draft_tokens_as_the_load_grows(ratios: Any, expected: Any) -> None:
    assert choose_schedule(ratios) == expected


def test_a_shorter_draft_counts_as_fast_as_it_was_measured() -> None:
    ratios = {4: {1: 1.3, 4: 0.8, 8: 0.6}, 2: {1: 1.2, 4: 1.1, 8: 0.7}}
    assert load_limit({}, ratios, choose_schedule(ratios)) == 4
    rows = (ScheduleRow(1, 1, 4), ScheduleRow(2, 64, 2))
    assert load_limit({}, {**ratios, 2: {1: 1.2, 4: 1.1, 8: 1.0}}, rows) is None
