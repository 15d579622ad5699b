"""The stream: hidden states from extraction engines to a trainer, in order, within a byte budget,
used once.

    requests ─ feeder ──credits──> engine ──connector──> store ─ receiver ──ring──> checked Sample
    ──> trainer
               (thread)                                          (thread)

With a cache on disk (`stream.mode`), samples that lie there take the road past the engine: feeder,
receiver, ring. Whether one lies there is asked when it is its turn to be requested, so a sample
that comes again within the feeder's lead is streamed twice.

The feeder takes credits for a sample's bytes before it sends the prefill request. The receiver
reads samples in request order into a ring of registered memory, removes their keys, checks them and
gives the credits back. Credits (what the store may hold) and ring (reader buffers) add up to less
than `budget_mib`. T tokens, L layers, H hidden.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Self

from components.contracts import StoreEndpoint, StreamReport, TargetFingerprint
from components.errors import DSparkError, StreamError
from components.hidden_states.cache import StateCache
from components.hidden_states.checks import LayerVariance, LmHead, LmHeadCheck
from components.hidden_states.extraction_client import ExtractionClient
from components.hidden_states.launch import extraction_layer_ids
from components.hidden_states.receiver import READ_AHEAD, Receiver
from components.hidden_states.sample import Arrival, Identity, Sample, SampleRequest
from components.hidden_states.statistics import StreamStatistics
from components.hidden_states.store import StoreClient, sweep_run
from components.hidden_states.wire import budget_split, checked_name, run_prefix
from components.settings import StreamSettings

__all__ = ["HiddenStateStream", "Sample", "SampleRequest", "sweep_run"]

Metrics = Callable[[dict[str, float]], None]

_TICK_S = 0.2
_METRICS_EVERY_S = 1.0
_STUCK_S = 2.0  # the consumer waits for a sample while it holds every buffer: nothing will come
# after cancelling requests: longer than an engine step, in which one may still finish and write
_SETTLE_S = 2.0
_END = object()


class HiddenStateStream:
    """Streams hidden states for a trainer. A context manager; leaving it, however, leaves no key in
    the store.

    Args:
        settings: layers, budget, requests in flight, retries, checks.
        engine_urls: extraction engines (started with `extraction_args`), base URLs without /v1;
            none in mode offline.
        model: served model name.
        store: the Mooncake store the engines write into; not used in mode offline.
        run_id: as given to `extraction_args`.
        fingerprint: of the target; samples stamped with another are refused.
        num_hidden_layers, hidden_size: of the target.
        target_path: folder of the target's safetensors; None switches the lm_head check off.
        on_metrics: called about once a second, on the consumer's thread, with the live figures.
        consumer: name of this reader within the run; trainer ranks that share engines need one
            each.

    Raises:
        StoreError, EngineError: on entry, when master or an engine is not there.
        FingerprintMismatchError: on entry in mode offline, when the cache holds states of other
            targets or layers only.
    """

    def __init__(
        self,
        settings: StreamSettings,
        *,
        engine_urls: Sequence[str],
        model: str,
        store: StoreEndpoint,
        run_id: str,
        fingerprint: TargetFingerprint,
        num_hidden_layers: int,
        hidden_size: int,
        target_path: Path | None = None,
        on_metrics: Metrics | None = None,
        consumer: str = "0",
    ) -> None:
        self._settings = settings
        self._engine_urls = tuple(engine_urls)
        self._model = model
        self._endpoint = store
        self._on_metrics = on_metrics
        self._identity = Identity(
            run_id=checked_name(run_id, what="the run id"),
            # The nonce keeps a restarted reader off the keys of its dead predecessor: a put on an
            # old key is ignored.
            consumer=f"{checked_name(consumer, what='the consumer')}-{secrets.token_hex(3)}",
            fingerprint=fingerprint,
            layer_ids=extraction_layer_ids(settings, num_hidden_layers=num_hidden_layers),
            hidden_size=hidden_size,
            dtype=settings.dtype,
        )

        self._prefix = run_prefix(run_id, consumer)
        self._variance = LayerVariance(self._identity.layer_ids)
        self._lm_head = (
            LmHeadCheck(settings, LmHead(target_path)) if target_path is not None else None
        )
        self._statistics = StreamStatistics(budget_bytes=settings.budget_mib << 20)
        self._stop = threading.Event()

        self._open = False
        self._is_passing = False
        self._keys_left = 0
        self._num_fed = 0
        self._metrics_at = 0.0
        self._client: StoreClient | None = None
        self._engines: ExtractionClient | None = None

        self._cache: StateCache | None = None
        self._receiver: Receiver | None = None
        self._threads: list[threading.Thread] = []
        self._old_sigterm: object = None

    def __enter__(self) -> Self:
        self._open = True
        try:
            self._open_cache()
            if self._settings.mode != "offline":
                self._connect()
            store_bytes, ring_bytes = budget_split(self._settings.budget_mib << 20)
            self._receiver = Receiver(
                self._settings,
                identity=self._identity,
                client=self._client,
                engines=self._engines,
                cache=self._cache,
                variance=self._variance,
                lm_head=self._lm_head,
                statistics=self._statistics,
                stop=self._stop,
                store_bytes=store_bytes,
                ring_bytes=ring_bytes,
            )
            self._catch_sigterm()
        except BaseException:
            self._close_quietly()
            raise

        return self

    def _open_cache(self) -> None:
        settings = self._settings
        if settings.cache_dir is not None:
            self._cache = StateCache.open(
                Path(settings.cache_dir),
                self._identity,
                limit_bytes=int(settings.cache_gib * 2**30),
                is_complete=settings.mode == "offline",
            )

    def _connect(self) -> None:
        self._client = StoreClient.connect(self._endpoint)
        self._engines = ExtractionClient(
            self._engine_urls,
            model=self._model,
            timeout_s=self._settings.request_timeout_s,
            num_connections=self._settings.requests_in_flight + 4,
        )
        self._engines.check_engines()
        self._client.remove_prefix(self._prefix)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except DSparkError as closing:
            if error is None:
                raise
            error.add_note(f"while closing the stream: {closing}")

    def stream(self, requests: Iterable[SampleRequest]) -> Iterator[Sample]:
        """Yield a checked sample per request, in request order; quarantined ones are left out.

        A sample's states are valid until its `release()`; hold no more than half the budget at
        once. A stream may make several passes, one after the other, each to its end; passes at the
        same time need a stream each.

        Raises:
            StreamError: too many samples are wrong, states and target do not belong together, the
                consumer asks for more while it holds every buffer, or an earlier pass did not reach
                its end.
            EngineError, StoreError: a service is gone and did not come back within the retries.
        """
        if not self._open or self._receiver is None:
            raise StreamError("the stream is not open", fix="Use it in a `with` statement.")
        if self._is_passing:
            raise StreamError(
                "an earlier pass over the stream did not reach its end",
                fix="Open a stream for each.",
            )

        self._is_passing = True
        arrivals: SimpleQueue[Arrival | None] = SimpleQueue()
        ready: SimpleQueue[object] = SimpleQueue()
        self._start(self._feed, iter(requests), arrivals, ready, name="hidden-states-feeder")
        self._start(self._run_receiver, arrivals, ready, name="hidden-states-receiver")
        self._statistics.start()

        try:
            while (item := self._next(ready)) is not _END:
                assert isinstance(item, Sample)
                yield item
            self._is_passing = False
        finally:
            self._statistics.pause()

    def require_cached(self, requests: Iterable[SampleRequest]) -> None:
        """Where the cache is all there is to read from, check that it holds these samples, before
        any is used.

        A sample that could not come over the engine either, because it is larger than the budget,
        is not asked for.

        Raises:
            StreamError: some are missing.
        """
        if self._settings.mode != "offline":
            return
        if self._cache is None or self._receiver is None:
            raise StreamError("the stream is not open", fix="Use it in a `with` statement.")

        wanted = [request for request in requests if self._receiver.fits(request)]
        missing = [
            request.sample_id for request in wanted if self._cache.find(request.token_ids) is None
        ]

        if missing:
            raise StreamError(
                f"{len(missing)} of {len(wanted)} samples are not among the cached states",
                got=f"first {missing[0]}",
                fix="Fill the cache over this dataset with stream.mode: hybrid, or raise "
                "stream.cache_gib.",
            )

    def report(self) -> StreamReport:
        """What the stream has done so far; complete after `close`."""
        return self._statistics.report(keys_left=self._keys_left)

    def close(self) -> None:
        """End requests and threads, remove this reader's keys from the store and count what is
        left.

        Raises:
            StoreError: the master is gone, so the keys could not be counted (its memory, and they,
                went with it).
        """
        if not self._open:
            return
        self._open = False
        self._stop.set()
        self._restore_sigterm()
        num_cancelled = self._statistics.num_in_flight

        try:
            if self._engines is not None:
                self._engines.close()
            for thread in self._threads:
                thread.join(timeout=10)
            if self._client is not None and self._receiver is not None:
                self._keys_left = self._sweep(settle_s=_SETTLE_S if num_cancelled else 0.0)
        finally:
            if self._receiver is not None:
                self._receiver.close()
            if self._client is not None:
                self._client.close()
            if self._cache is not None:
                self._statistics.cache_bytes = self._cache.num_bytes
                self._cache.close()

    def _sweep(self, *, settle_s: float) -> int:
        assert self._client is not None
        self._client.ping()
        deadline = time.monotonic() + settle_s
        while True:
            self._client.remove_prefix(self._prefix)
            if time.monotonic() >= deadline:
                return len(self._client.keys(self._prefix))
            time.sleep(0.1)

    def _close_quietly(self) -> None:
        with contextlib.suppress(DSparkError):  # the error that brought us here is the one to show
            self.close()

    def _start(self, target: Callable[..., None], *args: object, name: str) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _feed(
        self,
        requests: Iterator[SampleRequest],
        arrivals: SimpleQueue[Arrival | None],
        ready: SimpleQueue[object],
    ) -> None:
        """Feeder thread: one credit-bounded request after another, in order."""
        assert self._receiver is not None
        try:
            for request in requests:
                arrival = self._receiver.send(request, serial=self._num_fed)
                if arrival is None:
                    return
                self._num_fed += 1
                arrivals.put(arrival)
        except BaseException as error:  # noqa: BLE001 - it belongs to the consumer, whose iterable or stream it is
            ready.put(error)
        finally:
            arrivals.put(None)

    def _run_receiver(
        self, arrivals: SimpleQueue[Arrival | None], ready: SimpleQueue[object]
    ) -> None:
        """Receiver thread: read and check arrivals in order, the next few being read meanwhile."""
        receiver = self._receiver
        assert receiver is not None
        waiting: deque[Arrival | None] = deque()
        try:
            while not self._stop.is_set():
                self._take_waiting(arrivals, waiting)
                if not waiting:
                    receiver.observe()
                    continue
                for arrival in waiting:
                    if arrival is None or not receiver.read_ahead(arrival):
                        break
                if (arrival := waiting.popleft()) is None:
                    break
                sample = receiver.receive(arrival)
                if sample is not None:
                    ready.put(sample)
            ready.put(
                StreamError("the stream was closed while it was read")
                if self._stop.is_set()
                else _END
            )
        except BaseException as error:  # noqa: BLE001 - raised again on the consumer's thread
            self._stop.set()
            ready.put(error)

    @staticmethod
    def _take_waiting(
        arrivals: SimpleQueue[Arrival | None], waiting: deque[Arrival | None]
    ) -> None:
        """Fill `waiting` up to what may be read at once; wait a little only for the first."""
        with contextlib.suppress(Empty):
            if not waiting:
                waiting.append(arrivals.get(timeout=_TICK_S))
            while len(waiting) < READ_AHEAD and waiting[-1] is not None:
                waiting.append(arrivals.get_nowait())

    def _next(self, ready: SimpleQueue[object]) -> object:
        """Next item for the consumer. The receiver's waits are bounded, so is this one."""
        assert self._receiver is not None
        started = time.monotonic()
        try:
            while True:
                self._publish()
                with contextlib.suppress(Empty):
                    item = ready.get(timeout=_TICK_S)
                    if isinstance(item, BaseException):
                        raise item
                    return item
                self._refuse_deadlock(waited_s=time.monotonic() - started)
        finally:
            self._statistics.waited_s += time.monotonic() - started

    def _refuse_deadlock(self, *, waited_s: float) -> None:
        assert self._receiver is not None
        if not self._open:
            raise StreamError("the stream was closed while it was read")
        if waited_s > _STUCK_S and self._receiver.is_blocked_by_consumer:
            raise StreamError(
                "the consumer waits for a sample while it holds every reader buffer",
                got=f"{self._receiver.ring.num_held} unreleased samples, "
                f"{self._receiver.ring.used_bytes} bytes",
                expected=f"less than {self._receiver.ring.capacity_bytes} bytes held",
                fix="Release samples earlier, or raise stream.budget_mib.",
            )

    def _publish(self) -> None:
        now = time.monotonic()
        if self._on_metrics is not None and now - self._metrics_at >= _METRICS_EVERY_S:
            self._metrics_at = now
            self._on_metrics(self._statistics.live())

    def _catch_sigterm(self) -> None:
        """Let SIGTERM unwind the stack, so that `close` runs; only where nobody else has taken the
        signal.
        """
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._old_sigterm = signal.signal(signal.SIGTERM, _exit_on_signal)

    def _restore_sigterm(self) -> None:
        on_main = threading.current_thread() is threading.main_thread()
        if self._old_sigterm is not None and on_main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._old_sigterm = None


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
