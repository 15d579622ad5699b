"""How a trainer process ends when it is told to: after the step, out of a wait, or at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from components.system.child import PARENT_PID_VARIABLE
from components.training.packing import Pack


class _Interrupted(BaseException):
    """SIGTERM while waiting for states."""


class StopOnSignal:
    """Ends the process on SIGTERM in the way that fits the moment; a watch does it when the
    launching process is gone.

    In a step, the step is finished first. While waiting for states, the wait is given up. Elsewhere
    (opening, exporting) the stack unwinds at once, which closes the stream.
    """

    def __init__(self) -> None:
        self.requested = False
        self._on_request: Callable[[], None] = _unwind
        self._done = threading.Event()
        self._old: Any = None

    def __enter__(self) -> StopOnSignal:
        self._old = signal.signal(signal.SIGTERM, self._on_signal)
        parent_pid = os.environ.get(PARENT_PID_VARIABLE)
        if parent_pid is not None:
            threading.Thread(
                target=self._watch, args=(int(parent_pid),), name="parent-watch", daemon=True
            ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        signal.signal(signal.SIGTERM, self._old)

    def guard(self, packs: Iterator[Pack]) -> Iterator[Pack]:
        """`packs`, which end where a stop is requested; between packs the signal only sets
        `requested`.
        """
        try:
            while not self.requested:
                self._on_request = _interrupt
                try:
                    pack = next(packs, None)
                except _Interrupted:
                    return
                finally:
                    self._on_request = _note
                if pack is None:
                    return
                yield pack
        finally:
            self._on_request = _note

    def _on_signal(self, *_: object) -> None:
        self.requested = True
        self._on_request()

    def _watch(self, parent_pid: int) -> None:
        while not self._done.wait(1.0):
            try:
                os.kill(parent_pid, 0)
            except ProcessLookupError:
                os.kill(os.getpid(), signal.SIGTERM)
                return


def _unwind() -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _interrupt() -> None:
    raise _Interrupted


def _note() -> None:
    """The loop sees `requested` after the step."""
