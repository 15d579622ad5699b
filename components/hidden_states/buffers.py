"""Who may hold how many bytes: credits for what is on its way, a ring for what has arrived. Both
thread-safe.

Credits are taken, in request order, before a request is sent and given back when its sample has
been read and accepted. The ring is allocated in the same order. So the next sample a consumer waits
for always has its bytes, and no order of completion can block it.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from components.hidden_states.wire import align


class Credits:
    """A bounded number of bytes, handed out first come, first served."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._condition = threading.Condition()

    def acquire(self, num_bytes: int, *, timeout_s: float) -> bool:
        """Take `num_bytes`, waiting up to `timeout_s`; False if they did not come free."""
        assert num_bytes <= self.capacity_bytes, (
            "a request larger than the budget can never be sent"
        )
        with self._condition:
            if not self._condition.wait_for(
                lambda: self.used_bytes + num_bytes <= self.capacity_bytes, timeout_s
            ):
                return False
            self.used_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return True

    def release(self, num_bytes: int) -> None:
        """Give bytes back."""
        with self._condition:
            self.used_bytes -= num_bytes
            assert self.used_bytes >= 0, "credits released twice"
            self._condition.notify_all()


@dataclass
class Region:
    """A piece of the ring. `start` and `end` are byte offsets; `skipped` bytes before it were left
    out at the wrap.
    """

    start: int
    end: int
    skipped: int
    released: bool = False


class Ring:
    """Contiguous regions of one buffer, allocated in order; space comes back when the oldest
    regions are released.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._regions: deque[Region] = deque()
        self._condition = threading.Condition()

    @property
    def num_held(self) -> int:
        """Regions not released yet."""
        with self._condition:
            return sum(not region.released for region in self._regions)

    def allocate(self, num_bytes: int, *, timeout_s: float) -> Region | None:
        """A region of at least `num_bytes`, waiting up to `timeout_s`; None if no space came
        free.
        """
        size = align(num_bytes)
        assert size <= self.capacity_bytes, "a sample larger than the ring can never be read"
        region: Region | None = None

        def fits() -> bool:
            nonlocal region
            region = self._place(size)
            return region is not None

        with self._condition:
            if not self._condition.wait_for(fits, timeout_s):
                return None
            assert region is not None
            self._regions.append(region)
            self.used_bytes += size + region.skipped
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return region

    def release(self, region: Region) -> None:
        """Give a region back; a second release of the same region does nothing."""
        with self._condition:
            region.released = True
            while self._regions and self._regions[0].released:
                oldest = self._regions.popleft()
                self.used_bytes -= oldest.end - oldest.start + oldest.skipped
            self._condition.notify_all()

    def _place(self, size: int) -> Region | None:
        if not self._regions:
            return Region(start=0, end=size, skipped=0)
        tail, head = self._regions[-1].end, self._regions[0].start
        # Used bytes are one run; free are the end and, before `head`, the beginning.
        if tail > head:
            if tail + size <= self.capacity_bytes:
                return Region(start=tail, end=tail + size, skipped=0)
            return (
                Region(start=0, end=size, skipped=self.capacity_bytes - tail)
                if size <= head
                else None
            )

        return Region(start=tail, end=tail + size, skipped=0) if tail + size <= head else None
