"""What an engine has written and nobody has removed: the byte budget on the writing side, and the
sweep of orphans.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

_OBJECT_NOT_FOUND = -704


class StoreRefusedError(RuntimeError):
    """A sample was refused: over the byte budget, or the store has no room. The client may ask
    again.
    """


class HeldKeys:
    """Bytes this engine has put into the store and that nobody has removed yet. Thread-safe.

    The store tells nobody when a reader removes a key, so before refusing, and on every sweep, the
    keys are looked up.
    """

    def __init__(
        self, *, budget_bytes: int, orphan_ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._budget_bytes = budget_bytes
        self._orphan_ttl_s = orphan_ttl_s
        self._keys: dict[
            str, tuple[int, float | None]
        ] = {}  # key -> bytes, time of the put; None: being put
        self._num_bytes = 0
        self._lock = threading.Lock()

    def admit(self, key: str, num_bytes: int, *, store: Any) -> None:
        """Count `num_bytes` under `key`, which is about to be put; follow with `confirm` or `drop`.

        Raises:
            StoreRefusedError: that would pass the budget.
        """
        with self._lock:
            if self._num_bytes + num_bytes > self._budget_bytes:
                self._forget_removed(store)
            if self._num_bytes + num_bytes > self._budget_bytes:
                raise StoreRefusedError(
                    f"budget: {self._num_bytes} of {self._budget_bytes} bytes held unread in "
                    f"{len(self._keys)} samples,"
                    f" no room for {num_bytes} more"
                )
            self._keys[key] = (num_bytes, None)
            self._num_bytes += num_bytes

    def confirm(self, key: str) -> None:
        """The put succeeded: from now on the key may disappear, and its age counts."""
        with self._lock:
            num_bytes, _ = self._keys[key]
            self._keys[key] = (num_bytes, self._clock())

    def drop(self, key: str) -> None:
        """Stop counting `key`."""
        with self._lock:
            num_bytes, _ = self._keys.pop(key, (0, None))
            self._num_bytes -= num_bytes

    def sweep(self, store: Any) -> int:
        """Remove keys older than the TTL from the store; return how many orphans there were."""
        with self._lock:
            self._forget_removed(store)
            limit = self._clock() - self._orphan_ttl_s
            orphans = [
                key
                for key, (_, put_at) in self._keys.items()
                if put_at is not None and put_at < limit
            ]

        num_removed = 0
        for key in orphans:
            if store.remove(key, force=True) in (0, _OBJECT_NOT_FOUND):
                self.drop(key)
                num_removed += 1

        return num_removed

    def _forget_removed(self, store: Any) -> None:
        # A key that is being put does not exist yet, but is held.
        keys = [key for key, (_, put_at) in self._keys.items() if put_at is not None]
        for key, status in zip(keys, store.batch_is_exist(keys) if keys else [], strict=True):
            if status == 0:  # negative: the master did not answer; keep counting
                num_bytes, _ = self._keys.pop(key)
                self._num_bytes -= num_bytes
