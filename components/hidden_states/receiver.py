"""The reading side of the stream: sends a sample's request when it has credits, reads, checks,
retries, quarantines.

Bytes held are measured twice. From credits and ring: an upper bound, because credits are taken
before a sample exists. From the store: the master's allocated bytes above what it held when the
stream began, looked up at most twice a second, plus the ring. The report takes the larger. T
tokens, L layers, H hidden.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

import torch

from components.errors import EngineError, FingerprintMismatchError, StoreError, StreamError
from components.hidden_states.buffers import Credits, Region, Ring
from components.hidden_states.cache import StateCache
from components.hidden_states.checks import FaultyStatesError, LayerVariance, LmHeadCheck
from components.hidden_states.extraction_client import EngineAwayError, ExtractionClient
from components.hidden_states.read_buffer import ReadBuffer
from components.hidden_states.sample import Arrival, Entry, Identity, Sample, SampleRequest
from components.hidden_states.statistics import StreamStatistics
from components.hidden_states.store import StoreClient
from components.hidden_states.wire import error_key, sample_name, store_key
from components.settings import StreamSettings
from components.system.clock import Clock

__all__ = ["READ_AHEAD", "Receiver", "SampleRequest"]

READ_AHEAD = 4
"""Samples being read at once, the next one included. A read of 1 MB waits longer than it works."""

_TICK_S = 0.2
_OBSERVE_EVERY_S = 0.5
_MAX_FAILED_LOOKS = 3
_FIRST_POLL_S, _LONGEST_POLL_S = 0.001, 0.02
# the response comes before the write; a writer that neither wrote nor marked by then will not
_APPEAR_TIMEOUT_S = 30.0
_SHORTEST_APPEAR_S = 1.0
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 5.0
_HOPELESS = {"layers", "dtype", "fingerprint"}  # settings, not accidents: a retry gives the same


class Receiver:
    """See the module's docstring. `send` runs on the feeder's thread, everything else on the
    receiver's, but for reads ahead: they wait for the store and the network, not for a core, so a
    few of them go on at once.
    """

    def __init__(
        self,
        settings: StreamSettings,
        *,
        identity: Identity,
        client: StoreClient | None,
        engines: ExtractionClient | None,
        cache: StateCache | None,
        variance: LayerVariance,
        lm_head: LmHeadCheck | None,
        statistics: StreamStatistics,
        stop: threading.Event,
        store_bytes: int,
        ring_bytes: int,
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._client = client
        self._engines = engines
        self._cache = cache
        self._lm_head = lm_head
        self._statistics = statistics

        self._stop = stop
        self._clock = clock or Clock()
        self.credits = Credits(store_bytes)
        self.ring = Ring(ring_bytes)
        self.is_blocked_by_consumer = False
        self._slots = threading.Semaphore(settings.requests_in_flight)
        self._buffer = ReadBuffer(identity, variance, num_bytes=ring_bytes)

        # What other runs hold is not ours.
        self._before = client.metrics() if client is not None else None
        self._observed_at = 0.0
        self._num_failed_looks = 0
        self._readers = ThreadPoolExecutor(
            READ_AHEAD - 1, thread_name_prefix="hidden-states-reader"
        )
        if client is not None:
            client.register(self._buffer.tensor)

    def close(self) -> None:
        """End the reads and unregister the buffer; views that are still held stay readable."""
        self._readers.shutdown(cancel_futures=True)
        if self._client is not None:
            self._client.unregister(self._buffer.tensor)

    def fits(self, request: SampleRequest) -> bool:
        """Whether the budget could hold this sample at all; one that it could not is given up when
        its turn comes.
        """
        place = self._buffer.layout(request)
        return (
            place.num_bytes <= self.credits.capacity_bytes
            and self._buffer.num_bytes(place) <= self.ring.capacity_bytes
        )

    def send(self, request: SampleRequest, *, serial: int) -> Arrival | None:
        """Take credits and a slot, start the request; None when the stream ends meanwhile.

        A cached sample takes a slot, so that the feeder does not run far ahead, and no credits.

        Raises:
            StreamError: token ids and loss mask do not fit each other, or there is no engine and
                the sample is not in the cache.
        """
        num_tokens = len(request.token_ids)
        if (
            num_tokens == 0
            or request.loss_mask.shape != request.token_ids.shape
            or request.token_ids.ndim != 1
        ):
            raise StreamError(
                f"sample {request.sample_id} has no usable shape",
                got=f"token_ids {request.token_ids.shape}, loss_mask {request.loss_mask.shape}",
                expected="two equal shapes (T,), T >= 1",
            )

        place = self._buffer.layout(request)
        arrival = Arrival(request=request, serial=serial, place=place, future=None)
        if not self.fits(request):
            return arrival

        arrival.cached = self._cache.find(request.token_ids) if self._cache is not None else None
        if arrival.cached is not None:
            return arrival if self._take_slot() else None
        if self._engines is None:
            raise StreamError(
                f"sample {request.sample_id} is not among the cached states",
                fix="Fill the cache over this dataset with stream.mode: hybrid, or raise "
                "stream.cache_gib.",
            )

        while not self.credits.acquire(place.num_bytes, timeout_s=_TICK_S):
            if self._stop.is_set():
                return None

        if not self._take_slot():
            return None
        arrival.future = self._request(arrival, attempt=0)
        arrival.future.add_done_callback(lambda _: self._slots.release())
        self._account()

        return arrival

    def _take_slot(self) -> bool:
        while not self._slots.acquire(timeout=_TICK_S):
            if self._stop.is_set():
                return False
        return True

    def read_ahead(self, arrival: Arrival) -> bool:
        """Begin to read a sample before its turn; False where that has to wait for an engine or for
        the consumer.

        To be asked in request order and not past the first False: regions of the ring are given in
        that order.
        """
        if arrival.fetched is not None:
            return True
        if arrival.future is None or not arrival.future.done() or arrival.future.cancelled():
            return False
        if arrival.future.exception() is not None:
            return False

        arrival.region = self.ring.allocate(self._buffer.num_bytes(arrival.place), timeout_s=0)
        if arrival.region is None:
            return False

        name = self._name(arrival, attempt=0)
        arrival.fetched = self._readers.submit(
            self._fetch, arrival, arrival.region, name=name, on_wait=lambda: None
        )
        return True

    def receive(self, arrival: Arrival) -> Sample | None:
        """Read one sample, asking again when it is wrong; None when it was quarantined or the
        stream ends.

        Raises:
            EngineError, StoreError: a service is gone.
            FingerprintMismatchError, StreamError: no retry can help, or too many samples were
                quarantined.
        """
        if arrival.cached is not None:
            return self._receive_cached(arrival, arrival.cached)
        if arrival.future is None:
            self._quarantine(
                arrival, FaultyStatesError("too_large", "a sample exceeds half the budget")
            )
            return None

        region = arrival.region or self._allocate(self._buffer.num_bytes(arrival.place))
        if region is None:
            return None

        try:
            sample = self._try_repeatedly(arrival, region)
        except BaseException:
            self.ring.release(region)
            raise
        finally:
            self.credits.release(arrival.place.num_bytes)
            self._account()

        if sample is None:
            self.ring.release(region)
        return sample

    def _receive_cached(self, arrival: Arrival, entry: Entry) -> Sample | None:
        """Read a sample from the disk. A damaged one is given up for this pass: asking an engine
        now would need credits that the samples behind it hold. It is forgotten, so the next pass
        streams it.
        """
        assert self._cache is not None
        try:
            region = self._allocate(self._buffer.num_bytes(arrival.place))
        finally:
            self._slots.release()

        if region is None:
            return None
        view = self._buffer.view(region, arrival.place)
        try:
            if entry.num_bytes != arrival.place.num_bytes:
                raise FaultyStatesError(
                    "cache", "a cached sample has another size", got=entry.num_bytes
                )
            self._cache.read_into(entry, view)
            states_TLH = self._buffer.states(arrival.request, region, arrival.place, name=None)
        except StreamError as error:
            self.ring.release(region)
            self._cache.forget(arrival.request.token_ids)
            self._quarantine(arrival, FaultyStatesError("cache", error.problem, got=error.got))
            return None
        except BaseException:
            self.ring.release(region)
            raise

        statistics = self._statistics
        statistics.num_samples += 1
        statistics.num_cached += 1
        statistics.num_tokens += len(arrival.request.token_ids)
        return Sample(arrival.request, states_TLH, ring=self.ring, region=region)

    def observe(self) -> None:
        """Look at the store now and then. A master that is away for longer ends the stream.

        Raises:
            StoreError: three looks in a row failed.
        """
        now = self._clock.now()
        if (
            self._client is None
            or self._before is None
            or now - self._observed_at < _OBSERVE_EVERY_S
        ):
            return

        self._observed_at = now
        try:
            metrics = self._client.metrics()
        except StoreError:
            self._num_failed_looks += 1
            if self._num_failed_looks >= _MAX_FAILED_LOOKS:
                raise
            return

        self._num_failed_looks = 0
        statistics = self._statistics
        statistics.store_bytes = max(0, metrics.allocated_bytes - self._before.allocated_bytes)
        statistics.num_evicted = metrics.num_evicted - self._before.num_evicted
        statistics.bytes_on_disk = max(
            statistics.bytes_on_disk, metrics.file_bytes - self._before.file_bytes
        )

        statistics.peak_bytes_held = max(
            statistics.peak_bytes_held, statistics.store_bytes + self.ring.used_bytes
        )

    def _account(self) -> None:
        statistics = self._statistics
        statistics.credit_bytes, statistics.ring_bytes = (
            self.credits.used_bytes,
            self.ring.used_bytes,
        )
        held = statistics.credit_bytes + statistics.ring_bytes
        statistics.peak_bytes_held = max(statistics.peak_bytes_held, held)

    def _allocate(self, num_bytes: int) -> Region | None:
        try:
            while (region := self.ring.allocate(num_bytes, timeout_s=_TICK_S)) is None:
                if self._stop.is_set():
                    return None
                self.is_blocked_by_consumer = True
                self.observe()
        finally:
            self.is_blocked_by_consumer = False
        self._account()
        return region

    def _try_repeatedly(self, arrival: Arrival, region: Region) -> Sample | None:
        """Until it is right, its retries are used up, or its engine is away for too long; an outage
        costs no retry.
        """
        num_failed = 0
        attempt = 0
        away_since = None
        while True:
            try:
                future = arrival.future if attempt == 0 else self._request(arrival, attempt=attempt)
                assert future is not None
                token = self._result(future)
                return (
                    None
                    if token is None
                    else self._read(arrival, region, attempt=attempt, engine_token=token)
                )
            except FaultyStatesError as error:
                self._refuse_hopeless(error)
                num_failed = num_failed + 1
                away_since = None
                if error.reason == "refused" or num_failed > self._settings.max_retries:
                    self._quarantine(arrival, error)
                    return None
            except EngineAwayError:
                away_since = self._clock.now() if away_since is None else away_since
                if self._clock.now() - away_since >= self._settings.engine_outage_s:
                    raise
            except EngineError:
                num_failed = num_failed + 1
                away_since = None
                if num_failed > self._settings.max_retries:
                    raise
            self._statistics.num_retried += 1
            backoff_s = min(_FIRST_BACKOFF_S * 2**attempt, _LONGEST_BACKOFF_S) if attempt else 0.0
            if self._clock.wait(self._stop, backoff_s):
                return None
            attempt += 1

    def _request(self, arrival: Arrival, *, attempt: int) -> Future[int]:
        assert self._engines is not None
        future = self._engines.request(
            index=arrival.serial,
            name=self._name(arrival, attempt),
            token_ids=arrival.request.token_ids,
        )
        self._statistics.request_started()
        future.add_done_callback(lambda _: self._answered(arrival))
        return future

    def _answered(self, arrival: Arrival) -> None:
        arrival.answered_at = self._clock.now()
        self._statistics.request_ended()

    def _result(self, future: Future[int]) -> int | None:
        """The engine's next token; None when the stream ends. The client bounds every request
        itself.
        """
        while not self._stop.is_set():
            try:
                return future.result(timeout=_TICK_S)
            except FutureTimeoutError:
                self.observe()
            except CancelledError:
                return None
        return None

    def _read(self, arrival: Arrival, region: Region, *, attempt: int, engine_token: int) -> Sample:
        name = self._name(arrival, attempt)
        place = arrival.place
        if attempt == 0 and arrival.fetched is not None:
            bytes_on_disk = arrival.fetched.result()
        else:
            bytes_on_disk = self._fetch(arrival, region, name=name, on_wait=self.observe)

        self._statistics.bytes_on_disk += bytes_on_disk
        states_TLH = self._buffer.states(arrival.request, region, place, name=name)
        self._compare_with_target(arrival, states_TLH, engine_token=engine_token)
        if self._cache is not None:
            self._cache.add(arrival.request.token_ids, self._buffer.view(region, place))

        statistics = self._statistics
        statistics.num_samples += 1
        statistics.num_tokens += len(arrival.request.token_ids)
        statistics.bytes_streamed += place.num_bytes
        self.observe()

        return Sample(arrival.request, states_TLH, ring=self.ring, region=region)

    def _fetch(
        self, arrival: Arrival, region: Region, *, name: str, on_wait: Callable[[], None]
    ) -> int:
        """Wait for the object, copy it into the region and remove it from the store.

        Returns:
            How many of its bytes the store kept on a disk; looked up for some samples, 0 for the
            others.

        Raises:
            FaultyStatesError: 'writer' (the engine marked it), 'missing' (neither sample nor marker
                came), 'transfer', 'size' or what the header of an object of another size names.
        """
        assert self._client is not None
        key = store_key(self._identity.run_id, name)
        pointer = self._buffer.pointer(region)
        num_bytes = arrival.place.num_bytes
        # From the answer on, not from now: of an engine that died nothing comes, however many wait
        # in line for it.
        answered_at = self._clock.now() if arrival.answered_at is None else arrival.answered_at
        longest_s = min(_APPEAR_TIMEOUT_S, self._settings.request_timeout_s)
        deadline = max(
            answered_at + longest_s, self._clock.now() + min(_SHORTEST_APPEAR_S, longest_s)
        )

        poll_s = _FIRST_POLL_S
        while (outcome := self._client.read_into(key, pointer, num_bytes)) != "read":
            if outcome == "other size":
                data = self._client.read_small(key)
                self._client.remove(key)
                self._buffer.explain_size(data, arrival.request, name=name)
            if outcome == "broken":
                self._client.remove(key)
                raise FaultyStatesError(
                    "transfer", "a sample could not be read from the engine's memory", got=key
                )
            marker = self._client.read_small(error_key(key))
            if marker is not None:
                self._client.remove(error_key(key))
                raise FaultyStatesError(
                    "writer", "the engine could not store a sample", got=_marker_text(marker)
                )
            if self._clock.now() > deadline or self._stop.is_set():
                raise FaultyStatesError(
                    "missing",
                    "a sample never appeared in the store, or was evicted",
                    got=f"{key}{self._fill_level()}",
                )
            self._clock.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)
            on_wait()

        # A call to the master more; its own count of bytes on disks is watched all the time.
        is_looked_up = self._is_checked_closely(arrival)
        bytes_on_disk = (
            self._client.num_bytes_on_disk(key, num_bytes=num_bytes) if is_looked_up else 0
        )
        self._client.remove(key)

        return bytes_on_disk

    def _fill_level(self) -> str:
        """An engine that finds no room for a sample may find none for its marker either: say how
        full the store is.
        """
        assert self._client is not None
        try:
            metrics = self._client.metrics()
        except StoreError:
            return ""
        return (
            "; the store is "
            f"{100 * metrics.allocated_bytes / max(1, metrics.capacity_bytes):.0f} % full"
        )

    def _is_checked_closely(self, arrival: Arrival) -> bool:
        """One sample in `check_every` is."""
        return arrival.serial % self._settings.check_every == 0

    def _compare_with_target(
        self, arrival: Arrival, states_TLH: torch.Tensor, *, engine_token: int
    ) -> None:
        """Now and then: do the states lead to the target's own next tokens?"""
        request = arrival.request
        if self._lm_head is not None and self._is_checked_closely(arrival):
            self._lm_head.check(
                states_TLH[:, -1], token_ids=request.token_ids, loss_mask=request.loss_mask,
                engine_token=engine_token, greedy=request.greedy,
            )  # fmt: skip
            self._statistics.lm_head_share = self._lm_head.engine.share
            self._statistics.answer_share = self._lm_head.answers.share

    def _refuse_hopeless(self, fault: FaultyStatesError) -> None:
        if fault.reason not in _HOPELESS:
            return
        kind = FingerprintMismatchError if fault.reason == "fingerprint" else StreamError
        raise kind(
            f"the engine extracts for other settings: {fault.problem}",
            got=fault.got,
            expected=fault.expected,
            fix="Restart the extraction engine with this run's recipe.",
        )

    def _quarantine(self, arrival: Arrival, fault: FaultyStatesError) -> None:
        """Give a sample up.

        Raises:
            StreamError: more than `max_quarantine_share` were given up; one is always forgiven
                unless the share is 0.
        """
        statistics = self._statistics
        statistics.quarantined[fault.reason] += 1
        num_seen = statistics.num_samples + statistics.num_quarantined
        share = self._settings.max_quarantine_share
        allowed = max(share * num_seen, 1.0 if share > 0 else 0.0)
        if statistics.num_quarantined > allowed:
            raise StreamError(
                f"too many samples were quarantined; the last, {arrival.request.sample_id}: "
                f"{fault}",
                got=f"{statistics.num_quarantined} of {num_seen} ({dict(statistics.quarantined)})",
                expected=f"a share of at most {share}",
            )

    def _name(self, arrival: Arrival, attempt: int) -> str:
        return sample_name(consumer=self._identity.consumer, index=arrival.serial, attempt=attempt)


def _marker_text(marker: bytes) -> str:
    try:
        return str(json.loads(marker)["error"])
    except (ValueError, KeyError):
        return repr(marker[:200])
