"""The KV connector that runs inside vLLM and writes hidden states into the store. CPU and CUDA.

Built on hs_connectors' Mooncake connector, which keeps vLLM's disguise of hidden states as KV ([T,
L, H] as tokens, heads, head size) and reads it back when a request ends. What this subclass adds:

- the client names the sample (`kv_transfer_params: {"hidden_states_key": NAME}`); requests without
  a name store nothing, nor do aborted ones, so a consumer that hangs up leaves nothing behind;
- samples are written at the beginning of the next engine step, beside its forward pass, not after
  it;
- in this engine's own memory, and hard-pinned: an unread sample is never evicted, a full store
  refuses (-200) instead;
- a byte budget below the store's size: past it a sample is refused at once with an error marker,
  nothing queues;
- a header with run id, fingerprint, layer ids, dtype, shape and checksum (`wire`);
- samples nobody read for `orphan_ttl_s` are removed, so a consumer that was killed leaves an empty
  store.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from hs_connectors.mooncake_hidden_states_connector import MooncakeHiddenStatesConnector
from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig
from mooncake.store import ReplicateConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from components.contracts import TargetFingerprint
from components.errors import ConfigError
from components.hidden_states.codec import quantize
from components.hidden_states.in_vllm.held_keys import HeldKeys, StoreRefusedError
from components.hidden_states.wire import (
    FLOAT8,
    HEADER_BYTES,
    Layout,
    SampleHeader,
    checked_name,
    error_key,
    layout,
    pack_header,
    payload_checksum,
    store_key,
)

logger = init_logger(__name__)

_NO_AVAILABLE_HANDLE = -200


class CpuDevice:
    """Stand-in for an accelerator's stream module: CPU work is done when the call returns."""

    class Event:
        """An event that has always happened."""

        def record(self, stream: object = None) -> None:
            """Nothing to record."""

        def synchronize(self) -> None:
            """Nothing to wait for."""

    class Stream:
        """A stream without a queue."""

        def wait_event(self, event: object) -> None:
            """Nothing to wait for."""

        def synchronize(self) -> None:
            """Nothing to wait for."""

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: object) -> Iterator[object]:
        """Run the body on the only stream there is."""
        yield stream


class StampedStore(MooncakeHiddenStatesStore):
    """hs_connectors' store, writing our object format: pinned, stamped, within a budget."""

    def __init__(self, config: MooncakeStoreConfig, *, stream: dict[str, Any]) -> None:
        super().__init__(config)
        fingerprint = TargetFingerprint.model_validate(stream["fingerprint"])
        self._run_id = checked_name(stream["run_id"], what="the run id")
        self._weights = fingerprint.weights
        self._fingerprint = fingerprint.digest
        self._layer_ids = tuple(stream["layer_ids"])
        self._dtype = str(stream["dtype"])

        self._orphan_ttl_s = float(stream["orphan_ttl_s"])
        self.held = HeldKeys(
            budget_bytes=int(stream["budget_bytes"]), orphan_ttl_s=self._orphan_ttl_s
        )
        self._pinned = ReplicateConfig()
        self._pinned.with_hard_pin = True

    @property
    def run_id(self) -> str:
        """Run every key is filed under."""
        return self._run_id

    def setup(self) -> StampedStore:
        """Connect to the master and start the sweep of orphans."""
        if self.is_setup:
            return self
        super().setup()
        # Else the master places samples in any engine's memory, and another engine's death is ours:
        # status -800.
        self._pinned.preferred_segment = self._require_store().get_hostname()
        threading.Thread(
            target=self._sweep_forever, name="hidden-states-sweep", daemon=True
        ).start()
        return self

    def put_sample(
        self, transfer_manifest: dict[str, Any], tensors: dict[str, torch.Tensor]
    ) -> None:
        """Publish one sample; it becomes visible as a whole.

        Raises:
            StoreRefusedError: over the budget, or the store is full.
            RuntimeError: the store answered with another error.
        """
        key = transfer_manifest["handle"]
        states_TLH = tensors["hidden_states"]
        num_tokens, num_layers, hidden_size = states_TLH.shape
        place = layout(
            num_tokens=num_tokens, num_layers=num_layers, hidden_size=hidden_size, dtype=self._dtype
        )
        store = self._require_store()

        self.held.admit(key, place.num_bytes, store=store)
        try:
            buffer = self._staging_buffer("put", place.num_bytes)[: place.num_bytes]
            _fill(buffer, states_TLH, tensors["token_ids"], place=place, dtype=self._dtype)
            header = self._header(key, shape=(num_tokens, num_layers, hidden_size), buffer=buffer)
            buffer[:HEADER_BYTES] = torch.frombuffer(
                bytearray(pack_header(header)), dtype=torch.uint8
            )
            status = store.put_from(key, buffer.data_ptr(), place.num_bytes, self._pinned)
            if status == _NO_AVAILABLE_HANDLE:
                raise StoreRefusedError(
                    f"store full: no room for {place.num_bytes} bytes (status {status})"
                )
            if status != 0:
                raise RuntimeError(f"store refused {key}: status {status}")
        except BaseException:
            self.held.drop(key)
            raise

        self.held.confirm(key)

    def put_error(self, transfer_manifest: dict[str, Any], error: str) -> None:
        """Publish a small marker in place of a sample, so that its reader asks again instead of
        waiting.
        """
        key = error_key(transfer_manifest["handle"])
        status = self._require_store().put(
            key, json.dumps({"error": error[:2048]}).encode(), self._pinned
        )
        if status != 0:
            raise RuntimeError(f"store refused the error marker {key}: status {status}")
        # A marker is never refused, but swept like a sample.
        with contextlib.suppress(StoreRefusedError):
            self.held.admit(key, 0, store=self._require_store())
            self.held.confirm(key)

    def _header(
        self, key: str, *, shape: tuple[int, int, int], buffer: torch.Tensor
    ) -> SampleHeader:
        return SampleHeader(
            run_id=self._run_id,
            sample=key.removeprefix(store_key(self._run_id, "")),
            weights=self._weights,
            fingerprint=self._fingerprint,
            layer_ids=self._layer_ids,
            dtype=self._dtype,
            shape=shape,
            checksum=payload_checksum(memoryview(buffer.numpy())),
        )

    def _sweep_forever(self) -> None:
        while True:
            time.sleep(min(5.0, max(0.5, self._orphan_ttl_s / 4)))
            try:
                num_removed = self.held.sweep(self._require_store())
            except Exception:  # the sweep must outlive a master that is away for a while
                logger.exception("Sweep of unread hidden states failed; will try again")
                continue
            if num_removed:
                logger.warning(
                    "Removed %d samples that nobody read within %g s",
                    num_removed,
                    self._orphan_ttl_s,
                )


class DSparkHiddenStatesConnector(MooncakeHiddenStatesConnector):
    """Writes the hidden states of named requests into the store. See the module's docstring."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        stream = self._kv_transfer_config.get_from_extra_config("stream", None)
        if stream is None:
            raise ValueError(
                "kv_connector_extra_config has no 'stream'; launch the engine with "
                "extraction_args()"
            )
        if len(stream["layer_ids"]) != self._num_hidden_states:
            raise ValueError(
                f"stream.layer_ids names {len(stream['layer_ids'])} layers,"
                f" the engine extracts {self._num_hidden_states}"
            )

        config = MooncakeStoreConfig.from_dict(
            self._kv_transfer_config.get_from_extra_config("mooncake", {})
        )
        # On every rank: what `get_finished` will have to report.
        self._being_saved: set[str] = set()
        self._store: StampedStore = StampedStore(config, stream=stream)

    def _device(self) -> Any:
        if current_platform.is_cpu():
            return CpuDevice
        return super()._device()

    # Scheduler side
    # ----------------------------------------------------------------------------------------------

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Queue the save of a named, completed request. Others store nothing and free their blocks
        at once.
        """
        name = (request.kv_transfer_params or {}).get("hidden_states_key")
        completed = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )

        if name is None or not completed:
            self._request_keys.pop(request.request_id, None)
            return False, None

        try:
            key = store_key(self._store.run_id, checked_name(str(name), what="hidden_states_key"))
        except ConfigError as error:  # a client's mistake must not end the engine
            self._request_keys.pop(request.request_id, None)
            return False, {"error": str(error)}

        self._request_keys[request.request_id] = key
        _, manifest = super().request_finished(request, block_ids)
        assert manifest is not None
        return True, {
            "handle": manifest["handle"],
            "num_tokens": manifest["metadata"]["num_tokens"],
        }

    # Worker side
    # ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Connect to the store with the engine's start, so that a missing master fails the start,
        not a sample.
        """
        super().register_kv_caches(kv_caches)
        if self._is_tp_rank_zero:
            self._ensure_store()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Start the saves of the requests that ended in the last step, beside this step's forward
        pass.

        Upstream starts them after the pass; a prefill step takes a second or more, in which the
        sample would hold its credit for nothing. The blocks are not freed before `get_finished`
        reports the save, so this is safe.
        """
        super().bind_connector_metadata(connector_metadata)
        self._being_saved.update(pending.req_id for pending in connector_metadata.pending_saves)
        if not self._is_tp_rank_zero or self._kv_cache is None:
            return
        for pending in connector_metadata.pending_saves:
            ready = self._device().Event()
            ready.record()
            future = self._get_executor().submit(self._write_sample, pending, ready)
            self._req_futures[pending.req_id] = future

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report finished saves, and only those.

        Upstream saves every request and reports every one. A request that was not saved is already
        freed, and the scheduler ends the engine when it hears of a request it does not know.
        """
        saved, loaded = super().get_finished(finished_req_ids & self._being_saved)
        self._being_saved -= saved or set()
        return saved, loaded


def _fill(
    buffer: torch.Tensor,
    states_TLH: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    place: Layout,
    dtype: str,
) -> None:
    """Copy a sample into its staging buffer; bytes between the parts are zeroed so that the
    checksum is defined.
    """
    parts = [(place.tokens_offset, token_ids.to(torch.int32))]
    if dtype == FLOAT8:
        values_TLH, scales_TL = quantize(states_TLH)
        parts += [(place.states_offset, values_TLH), (place.scales_offset, scales_TL)]
    else:
        parts += [(place.states_offset, states_TLH.to(getattr(torch, dtype)))]
    end = place.states_offset
    for offset, part in sorted(parts, key=lambda item: item[0]):
        buffer[end:offset].zero_()
        end = offset + part.numel() * part.element_size()
        buffer[offset:end].view(part.dtype).view(part.shape).copy_(part)
    buffer[end:].zero_()
