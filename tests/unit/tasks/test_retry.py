"""Which failures are tried again."""

from __future__ import annotations

import pytest
from prefect.states import Completed, Failed

from components.errors import ConfigError, EngineError, TargetError
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
