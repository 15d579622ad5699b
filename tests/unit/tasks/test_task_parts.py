"""The parts of tasks that are logic: what is retried, what a user sees of an error, names of
artifacts.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from prefect.states import Completed, Failed

from components.errors import ConfigError, EngineError, TargetError
from components.reporting.markdown_table import markdown_table
from components.settings import load_recipe
from components.stages.targets import watched_path
from tasks.artifacts import _key
from tasks.flow_run import show_errors_as_one_line
from tasks.retry import is_transient

pytestmark = pytest.mark.filterwarnings("ignore:.*without a flow run id")


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (EngineError("engine died"), True),
        (RuntimeError("nobody foresaw this"), True),
        (ConfigError("unknown key"), False),
        (TargetError("sha256 mismatch"), False),
    ],
)
def test_only_what_a_restart_can_cure_is_retried(error: Exception, again: bool) -> None:
    assert is_transient(None, None, Failed(data=error)) is again


def test_a_completed_task_is_not_retried() -> None:
    assert is_transient(None, None, Completed(data=1)) is False


def log_error(caplog: pytest.LogCaptureFixture, error: Exception) -> str:
    show_errors_as_one_line()
    logger = logging.getLogger("prefect.flow_runs")
    logger.addHandler(caplog.handler)
    try:
        raise error
    except Exception as caught:
        logger.error("Encountered exception during execution: %r", caught, exc_info=True)
    finally:
        logger.removeHandler(caplog.handler)
    return caplog.text


def test_an_error_raised_on_purpose_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    text = log_error(caplog, ConfigError("no such recipe", got="dmo", expected="demo"))
    assert "ConfigError: no such recipe; got dmo; expected demo" in text
    assert "Traceback" not in text


def test_a_bug_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    assert "Traceback" in log_error(caplog, ZeroDivisionError("division by zero"))


def test_artifact_keys_hold_what_prefect_allows() -> None:
    assert _key("Gate: acceptance_by slice (95 %)") == "gate-acceptance-by-slice-95"


def test_markdown_table_escapes_pipes() -> None:
    assert markdown_table(("a", "b"), [("x|y", 1)]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| x\\|y | 1 |",
    ]


def test_a_package_target_is_watched_in_the_state_folder() -> None:
    assert watched_path(load_recipe("demo"), Path("state")) == Path("state/published/smollm2-135m")


def test_a_hub_target_is_watched_at_its_source() -> None:
    assert watched_path(load_recipe("qwen3-8b"), Path("state")) is None
