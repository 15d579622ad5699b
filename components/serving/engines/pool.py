"""The engines of one process by key: started once, shared by whoever asks for the same key, all
stopped at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from components.contracts import TargetFingerprint
from components.serving.engines.command import EngineSpec
from components.serving.engines.engine import Engine, free_engine_port

ENDING_S = 5.0
"""An engine that stopped answering because it died has ended by then; one that has not is alive."""


class EnginePool:
    """Holds running engines; `start` returns the one that already runs under a key.

    A context manager: leaving it, however, stops every engine that was not handed over.
    """

    def __init__(self, *, logs_dir: Path, port_base: int) -> None:
        self._logs_dir = logs_dir
        self._next_port = port_base
        self._engines: dict[str, Engine] = {}
        self._num_revived = 0
        self._lock = threading.Lock()

    def start(
        self,
        key: str,
        make_spec: Callable[[int], EngineSpec],
        *,
        fingerprint: TargetFingerprint,
        allow_unbound: bool = False,
    ) -> Engine:
        """Start an engine without waiting for it, or return the live one of this key.

        Args:
            key: names what is served (mode, target and drafter by content).
            make_spec: builds the spec for the port the pool picked.
            fingerprint: of the target; a drafter bound to another is refused.
            allow_unbound: measuring an old drafter on a new target.

        Raises:
            PortInUseError, EngineError, FingerprintMismatchError: as `Engine.start`.
        """
        with self._lock:
            running = self._engines.get(key)
            if running is not None and running.is_alive():
                return running

            spec = make_spec(self._take_port())
            engine = Engine.start(
                spec,
                log_path=self._logs_dir / f"{spec.name}.log",
                fingerprint=fingerprint,
                allow_unbound=allow_unbound,
            )

            self._engines[key] = engine
            return engine

    def restart(self, key: str, *, number: int) -> Engine:
        """Start the ended engine of `key` again, on its port, without waiting for it.

        Args:
            key: as given to `start`.
            number: how often that happened; its log gets a name of its own, so that the last words
                are kept.

        Raises:
            PortInUseError, EngineError: as `Engine.start`.
        """
        with self._lock:
            ended = self._engines[key]
            ended.stop()
            engine = Engine.start(
                ended.spec,
                log_path=self._logs_dir / f"{ended.spec.name}-restart-{number}.log",
                fingerprint=None,
                allow_unbound=True,  # whoever started it first was checked
            )
            self._engines[key] = engine
            return engine

    def at(self, url: str) -> Engine | None:
        """The engine that serves, or served, at `url`."""
        with self._lock:
            return next((engine for engine in self._engines.values() if engine.url == url), None)

    def revive(self, url: str) -> Engine | None:
        """Start the engine that served at `url` again, if it has ended, without waiting for it;
        None if it has not.

        Raises:
            PortInUseError, EngineError: as `Engine.start`.
        """
        with self._lock:
            keys = [key for key, engine in self._engines.items() if engine.url == url]
        if not keys or not self._engines[keys[0]].wait_ended(ENDING_S):
            return None
        self._num_revived += 1
        return self.restart(keys[0], number=self._num_revived)

    def _take_port(self) -> int:
        # An engine binds its port long after its start, so a port once given is not free, whatever
        # a probe says.
        port = free_engine_port(self._next_port)
        self._next_port = port + 1
        return port

    def stop(self, key: str) -> None:
        """Stop the engine of `key`, if it runs."""
        with self._lock:
            engine = self._engines.pop(key, None)
        if engine is not None:
            engine.stop()

    def keep_only(self, keys: Collection[str]) -> None:
        """Stop every engine but those of `keys`: memory and cores for what comes next."""
        for key in [key for key in self._engines if key not in keys]:
            self.stop(key)

    def hand_over(self, key: str) -> Engine:
        """Take an engine out of the pool, still running; whoever called owns it from now on."""
        with self._lock:
            return self._engines.pop(key)

    def close(self) -> None:
        """Stop everything; the first failure to stop is raised after all were tried."""
        with self._lock:
            engines = list(self._engines.values())
            self._engines = {}
        errors: list[Exception] = []
        for engine in engines:
            try:
                engine.stop()
            except Exception as error:  # noqa: BLE001 - every engine must be tried before the first error is raised
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
