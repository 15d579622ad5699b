"""Progress lines, progress artifacts and Markdown artifacts: what a person sees in the Prefect UI
and the log.
"""

from __future__ import annotations

import base64
import contextvars
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast
from uuid import UUID

from prefect.artifacts import (
    create_image_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.logging import get_run_logger

from components.contracts import Progress
from components.system.child_lines import ChildLine, OnChildLine

LOG_INTERVAL_S = 5.0


def progress_reporter(name: str) -> Progress:
    """A `Progress` callback that logs at most every 5 s and keeps one progress artifact (percent)
    up to date.

    It may be called from inside an event loop, where Prefect's clients would answer with
    coroutines, and it must not slow the work: artifacts are written by a thread of their own, in
    the run's context. One that cannot be written is logged and the work goes on, as the log line
    already says the same.
    """
    logger = get_run_logger()
    show = progress_artifact(name)
    last_logged = float("-inf")

    def report(what: str, num_done: int, num_total: int) -> None:
        nonlocal last_logged
        finished = num_done >= num_total
        if not finished and time.monotonic() - last_logged < LOG_INTERVAL_S:
            return
        last_logged = time.monotonic()
        logger.info("%s: %s (%d/%d)", name, what, num_done, num_total)
        show(100.0 * num_done / num_total if num_total else 100.0, f"{name}: {what}")

    return report


def child_reporter(name: str) -> OnChildLine:
    """Logs every line of a child process under its name, and keeps a progress artifact at the
    latest one that says how far it is.
    """
    logger = get_run_logger()
    show = progress_artifact(name)

    def on_line(line: ChildLine) -> None:
        percent = line.percent
        if percent is None:
            logger.info("%s: %s", name, line.what)
            return
        words = f"{name}: {percent:.0f} %, {line.what}"
        logger.info(words)
        show(percent, words)

    return on_line


def progress_artifact(name: str) -> Callable[[float, str], None]:
    """Keeps one progress artifact of the current run at the percent and words it is called with.

    See `progress_reporter` for how it is written.
    """
    logger = get_run_logger()
    writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="progress")
    artifact_ids: list[UUID] = []

    def write(percent: float, words: str) -> None:
        try:
            if artifact_ids:
                update_progress_artifact(
                    artifact_id=artifact_ids[0], progress=percent, description=words
                )
            else:
                artifact_id = create_progress_artifact(
                    progress=percent, key=_key(name), description=words
                )
                # No event loop in this thread: never a coroutine.
                artifact_ids.append(cast(UUID, artifact_id))
        except Exception as error:  # noqa: BLE001 - any client failure; reported below
            logger.warning("progress artifact of %s not written: %s", name, error)

    def show(percent: float, words: str) -> None:
        writer.submit(contextvars.copy_context().run, write, percent, words)

    return show


def publish_markdown(key: str, markdown: str, *, description: str) -> None:
    """Keep `markdown` as an artifact of the current run."""
    create_markdown_artifact(key=_key(key), markdown=markdown, description=description)


def publish_image(key: str, png: Path, *, description: str) -> None:
    """Keep a PNG as an artifact of the current run; it travels inside the artifact, no file server
    is needed.
    """
    data = base64.b64encode(Path(png).read_bytes()).decode()
    create_image_artifact(
        key=_key(key), image_url=f"data:image/png;base64,{data}", description=description
    )


def _key(name: str) -> str:
    """Prefect's artifact keys hold lowercase letters, digits and dashes only."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
