"""What the stream counts, live and for the report."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from components.contracts import StreamReport


@dataclass
class StreamStatistics:
    """Counters of one stream. Each is written by one thread only, but for `num_in_flight`; reading
    needs no lock.
    """

    budget_bytes: int
    num_samples: int = 0
    num_tokens: int = 0
    bytes_streamed: int = 0
    bytes_on_disk: int = 0
    peak_bytes_held: int = 0
    num_retried: int = 0
    num_in_flight: int = 0
    num_evicted: int = 0
    num_cached: int = 0
    cache_bytes: int = 0
    credit_bytes: int = 0
    ring_bytes: int = 0
    store_bytes: int = 0
    waited_s: float = 0.0
    active_s: float = 0.0
    lm_head_share: float | None = None
    answer_share: float | None = None
    quarantined: Counter[str] = field(default_factory=Counter)
    busy_s: float = 0.0
    _started_at: float | None = None
    _busy_since: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def request_started(self) -> None:
        """A request went to an engine."""
        with self._lock:
            if self.num_in_flight == 0:
                self._busy_since = time.monotonic()
            self.num_in_flight += 1

    def request_ended(self) -> None:
        """It was answered, failed or was cancelled."""
        with self._lock:
            self.num_in_flight -= 1
            if self.num_in_flight == 0 and self._busy_since is not None:
                self.busy_s += time.monotonic() - self._busy_since
                self._busy_since = None

    @property
    def num_quarantined(self) -> int:
        """Samples given up."""
        return sum(self.quarantined.values())

    def start(self) -> None:
        """The consumer begins to iterate."""
        self._started_at = time.monotonic()

    def pause(self) -> None:
        """The consumer stops iterating."""
        self.active_s = self.duration_s
        self._started_at = None

    @property
    def duration_s(self) -> float:
        """Wall time spent iterating."""
        running = time.monotonic() - self._started_at if self._started_at is not None else 0.0
        return self.active_s + running

    @property
    def wait_share(self) -> float:
        """Share of it that the consumer waited, 0 to 1."""
        return min(1.0, self.waited_s / self.duration_s) if self.duration_s > 0 else 0.0

    @property
    def engine_idle_share(self) -> float:
        """Share of it in which no request was at any engine, 0 to 1."""
        with self._lock:
            busy_s = self.busy_s + (
                time.monotonic() - self._busy_since if self._busy_since is not None else 0.0
            )
        return max(0.0, 1.0 - busy_s / self.duration_s) if self.duration_s > 0 else 0.0

    def live(self) -> dict[str, float]:
        """Figures for a metrics backend."""
        duration_s = max(self.duration_s, 1e-9)
        values = {
            "stream_tokens_per_s": self.num_tokens / duration_s,
            "stream_bytes_per_s": self.bytes_streamed / duration_s,
            "stream_num_samples": float(self.num_samples),
            "stream_num_in_flight": float(self.num_in_flight),
            "stream_bytes_held": float(self.credit_bytes + self.ring_bytes),
            "stream_store_bytes": float(self.store_bytes),
            "stream_num_retried": float(self.num_retried),
            "stream_num_quarantined": float(self.num_quarantined),
            "stream_num_evicted": float(self.num_evicted),
            "stream_num_cached": float(self.num_cached),
            "stream_trainer_wait_share": self.wait_share,
            "stream_engine_idle_share": self.engine_idle_share,
        }

        if self.lm_head_share is not None:
            values["stream_lm_head_agreement"] = self.lm_head_share
        if self.answer_share is not None:
            values["stream_answer_agreement"] = self.answer_share
        return values

    def report(self, *, keys_left: int) -> StreamReport:
        """The record of the run."""
        duration_s = self.duration_s
        return StreamReport(
            num_samples=self.num_samples,
            num_tokens=self.num_tokens,
            bytes_streamed=self.bytes_streamed,
            budget_bytes=self.budget_bytes,
            peak_bytes_held=self.peak_bytes_held,
            bytes_on_disk=self.bytes_on_disk,
            keys_left=keys_left,
            num_cached=self.num_cached,
            cache_bytes=self.cache_bytes,
            num_retried=self.num_retried,
            num_quarantined=self.num_quarantined,
            quarantine_reasons=dict(self.quarantined),
            trainer_wait_share=self.wait_share,
            engine_idle_share=self.engine_idle_share,
            tokens_per_s=self.num_tokens / duration_s if duration_s else 0.0,
            duration_s=duration_s,
        )
