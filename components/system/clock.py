"""Time as the reading side sees it, so that a simulation can put another in its place."""

from __future__ import annotations

import threading
import time


class Clock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def sleep(self, duration_s: float) -> None:
        """Let time pass."""
        time.sleep(duration_s)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Let time pass until the event is set; whether it is."""
        return event.wait(timeout_s)
