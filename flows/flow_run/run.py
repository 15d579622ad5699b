"""A flow run: opens the run that its stages share, and shows in Prefect what they tell."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from components.contracts import Progress, now_utc
from components.errors import DSparkError
from components.stages.run import Run, open_run
from components.system.child_lines import OnChildLine
from flows.flow_run.artifacts import (
    child_reporter,
    progress_reporter,
    publish_image,
    publish_markdown,
)


class PrefectReporter:
    """A `Reporter` whose lines and artifacts belong to the flow or task run that tells them."""

    def info(self, message: str, *values: object) -> None:
        """A line in the run's log."""
        get_run_logger().info(message, *values)

    def warning(self, message: str, *values: object) -> None:
        """A line in the run's log that stands out."""
        get_run_logger().warning(message, *values)

    def progress(self, name: str) -> Progress:
        """See `progress_reporter`."""
        return progress_reporter(name)

    def child(self, name: str) -> OnChildLine:
        """See `child_reporter`."""
        return child_reporter(name)

    def markdown(self, key: str, markdown: str, *, description: str) -> None:
        """See `publish_markdown`."""
        publish_markdown(key, markdown, description=description)

    def image(self, key: str, png: Path, *, description: str) -> None:
        """See `publish_image`."""
        publish_image(key, png, description=description)


@contextmanager
def run_of(recipe: str, *, size: str | None, begun_at: datetime | None = None) -> Iterator[Run]:
    """The run of this flow, or the one that is open: subflows of a lifecycle join it.

    Raises:
        ConfigError, ServiceError: as `open_run`.
    """
    show_errors_as_one_line()
    with open_run(
        recipe,
        size=size,
        name=str(flow_run.name),
        started_at=flow_run.scheduled_start_time or now_utc(),
        reporter=PrefectReporter(),
        begun_at=begun_at,
    ) as run:
        yield run


def show_errors_as_one_line() -> None:
    """Log an error raised on purpose as its one message; anything else keeps its traceback.

    Prefect logs every failure of a run with the traceback, which tells a user nothing about a
    mistyped key.
    """
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logger = logging.getLogger(name)
        if _without_traceback not in logger.filters:
            logger.addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, DSparkError):
        record.exc_info, record.exc_text = None, None
        record.msg = f"{type(error).__name__}: {error}"
        record.args = ()
    return True
