"""What a run tells while it runs: a line at least every ten seconds, and metrics to MLflow that
never stall a step.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from typing import Any

from components.system.child_lines import ChildLine, tell_parent

LINE_EVERY_S = 5.0
FLUSH_EVERY_S = 2.0
MAX_BATCH = 500
"""Metrics per MLflow request; the server takes at most 1,000."""


class ProgressTicker:
    """Tells the parent the latest status; repeats it with its age when nothing new came for a
    while.
    """

    def __init__(self, *, every_s: float = LINE_EVERY_S) -> None:
        self._every_s = every_s
        self._status = ChildLine("starting")
        self._changed_at = self._told_at = time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> ProgressTicker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def update(self, what: str, *, percent: float | None = None, now: bool = False) -> None:
        """Set the status; tell it if the last one is old enough, or at once with `now`.

        Args:
            what: in words.
            percent: of the work that is done, where that is known.
            now: whether it must be told, however young the last line is.
        """
        status = ChildLine(what) if percent is None else ChildLine(what, round(percent), 100)
        with self._lock:
            self._status = status
            self._changed_at = time.monotonic()
            if now or time.monotonic() - self._told_at >= self._every_s:
                self._tell(status)

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            with self._lock:
                age_s = time.monotonic() - self._changed_at
                # Steps print their own lines; this one is for when none completes.
                if time.monotonic() - self._told_at >= 1.5 * self._every_s:
                    what = f"{self._status.what} (for {age_s:.0f} s)"
                    self._tell(replace(self._status, what=what))

    def _tell(self, line: ChildLine) -> None:
        tell_parent(line)
        self._told_at = time.monotonic()


class MetricsLog:
    """Sends metrics to one MLflow run from a thread; a tracking server that is away costs points,
    never the run.

    Args:
        tracking_uri: of the server; None switches logging off.
        run_id: an existing run.
    """

    def __init__(self, *, tracking_uri: str | None, run_id: str | None) -> None:
        self._queue: queue.SimpleQueue[tuple[str, float, int, int] | None] = queue.SimpleQueue()
        self._num_lost = 0
        self._problem: str | None = None
        self._client: Any = None
        self._run_id = run_id
        self._thread: threading.Thread | None = None
        if tracking_uri is not None and run_id is not None:
            from mlflow import MlflowClient

            self._client = MlflowClient(tracking_uri=tracking_uri)
            self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)

    def __enter__(self) -> MetricsLog:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=60)
            if self._num_lost:
                lost = f"warning: {self._num_lost} metric points did not reach MLflow"
                tell_parent(ChildLine(f"{lost}: {self._problem}"))

    def log(self, values: dict[str, float], *, step: int) -> None:
        """Queue a point of each metric at `step`."""
        if self._thread is not None:
            now_ms = time.time_ns() // 1_000_000
            for name, value in values.items():
                self._queue.put((name, float(value), now_ms, step))

    def _run(self) -> None:
        from mlflow.entities import Metric

        is_open = True
        while is_open:
            points: list[Any] = []
            deadline = time.monotonic() + FLUSH_EVERY_S
            while len(points) < MAX_BATCH and (left_s := deadline - time.monotonic()) > 0:
                try:
                    item = self._queue.get(timeout=left_s)
                except queue.Empty:
                    break
                if item is None:
                    is_open = False
                    break
                points.append(Metric(key=item[0], value=item[1], timestamp=item[2], step=item[3]))
            if points:
                self._send(points)

    def _send(self, points: list[Any]) -> None:
        try:
            self._client.log_batch(self._run_id, metrics=points)
        except Exception as error:  # noqa: BLE001  # whatever the tracking client raises, it is counted and reported
            self._num_lost += len(points)
            self._problem = str(error).splitlines()[0]
