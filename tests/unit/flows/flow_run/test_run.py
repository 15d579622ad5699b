"""What a user sees of an error that ends a run."""

from __future__ import annotations

import logging

import pytest

from components.errors import ConfigError
from flows.flow_run.run import show_errors_as_one_line

pytestmark = pytest.mark.filterwarnings("ignore:.*without a flow run id")


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
