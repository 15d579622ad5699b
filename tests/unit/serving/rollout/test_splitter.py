"""Weights and answers of HAProxy's runtime API, without HAProxy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.contracts import Slot
from components.errors import SplitterError
from components.services import haproxy
from components.serving.rollout import splitter as splitter_module
from components.serving.rollout.splitter import Splitter, is_success, parse_stat, weights_for

STAT = """\
# pxname,svname,scur,stot,wredis,status,weight,addr,
engines,candidate,1,7,2,UP,5,127.0.0.1:8101,
engines,baseline,3,93,0,UP 1/3,95,127.0.0.1:8100,

"""


def test_names_are_those_of_the_rendered_configuration() -> None:
    assert splitter_module.BACKEND == haproxy.BACKEND
    assert tuple(Slot) == (haproxy.CANDIDATE, haproxy.BASELINE)
    assert splitter_module.ARM_HEADER == haproxy.ARM_HEADER


@given(st.integers(min_value=0, max_value=100))
def test_whole_percentages_are_exact(percent: int) -> None:
    candidate, baseline = weights_for(percent)
    assert candidate * 100 == percent * (candidate + baseline)
    assert min(candidate, baseline) >= 0 and 0 < max(candidate, baseline) <= 256


@given(st.floats(min_value=0.5, max_value=99.5))
def test_other_percentages_are_within_a_thousandth(percent: float) -> None:
    candidate, baseline = weights_for(percent)
    assert abs(candidate / (candidate + baseline) - percent / 100) <= 0.001
    assert 1 <= candidate <= 256 and 1 <= baseline <= 256


@pytest.mark.parametrize("percent", [-1, 100.5, 0.1, 99.9])
def test_shares_that_cannot_be_given(percent: float) -> None:
    with pytest.raises(SplitterError, match="expected 0"):
        weights_for(percent)


def test_stat_rows() -> None:
    slots = parse_stat(STAT)
    assert slots["candidate"].url == "http://127.0.0.1:8101"
    assert (
        slots["candidate"].weight,
        slots["candidate"].num_sessions,
        slots["candidate"].num_total,
    ) == (5, 1, 7)
    assert slots["candidate"].num_redispatched == 2
    assert (
        slots["candidate"].is_checked
        and slots["baseline"].is_up
        and not slots["baseline"].is_checked
    )


@pytest.mark.parametrize(
    ("answer", "yes"),
    [
        ("\n", True),
        ("IP changed from '127.0.0.1' to '127.0.0.2' by 'stats socket command'\n", True),
        ("no need to change the addr, no need to change the port\n", True),
        ("No such server.\n", False),
        ("Invalid addr 'foo' by 'stats socket command'\n", False),
        ("Require 'backend/server'.\n", False),
    ],
)
def test_answers(answer: str, yes: bool) -> None:
    assert is_success(answer) is yes


def test_no_haproxy_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SplitterError, match=r"does not answer.*make up"):
        Splitter(tmp_path / "none.sock", "http://127.0.0.1:1").state()
