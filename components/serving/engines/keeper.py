"""Restarts an engine that dies while others depend on it."""

from __future__ import annotations

import time
from collections.abc import Callable

from components.errors import PortInUseError
from components.serving.engines.engine import Engine
from components.serving.engines.pool import EnginePool

MAX_RESTARTS = 3
"""A run whose engine dies more often has another problem than bad luck."""
PORT_GRACE_S = 20.0


class EngineKeeper:
    """Watches one engine of a pool. `check` is to be called about once a second; it never waits for
    a start.

    An engine that ended before it was ever ready is not started again: it would only fail the same
    way.

    Args:
        pool: where the engine was started.
        key: its key there.
        engine: the engine, started and not necessarily ready.
        on_restart: told how often it was restarted by now.
    """

    def __init__(
        self,
        pool: EnginePool,
        key: str,
        engine: Engine,
        *,
        on_restart: Callable[[int], None] | None = None,
    ) -> None:
        self._pool = pool
        self._key = key
        self._engine = engine
        self._on_restart = on_restart
        self._was_ready = False
        self._died_at: float | None = None
        self.num_restarts = 0

    def check(self) -> None:
        """Start the engine again if it is gone.

        Raises:
            EngineError: it ended before it was ready, or once too often; the telling lines of its
                log are in the message.
            PortInUseError: something else has taken its port, and keeps it.
        """
        if self._engine.is_alive():
            self._was_ready = self._was_ready or self._engine.is_ready()
            return
        if not self._was_ready or self.num_restarts == MAX_RESTARTS:
            self._engine.wait_ready()  # raises

        self._died_at = time.monotonic() if self._died_at is None else self._died_at
        try:
            self._engine = self._pool.restart(self._key, number=self.num_restarts + 1)
        except PortInUseError:
            if time.monotonic() - self._died_at < PORT_GRACE_S:
                return  # the kernel is still taking its processes down; the next check tries again
            raise

        self.num_restarts += 1
        self._was_ready = False
        self._died_at = None
        if self._on_restart is not None:
            self._on_restart(self.num_restarts)
