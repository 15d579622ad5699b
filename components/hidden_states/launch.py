"""Turn a plain vLLM engine into one that writes hidden states into the store, by arguments and
environment alone.
"""

from __future__ import annotations

import json

from components.contracts import StoreEndpoint, TargetFingerprint
from components.errors import ConfigError
from components.hidden_states.wire import budget_split, checked_name
from components.settings import StreamSettings

CONNECTOR_MODULE = "components.hidden_states.in_vllm.connector"
CONNECTOR_CLASS = "DSparkHiddenStatesConnector"

_LOCAL_BUFFER_BYTES = 16 << 20  # only markers go through it; samples are put from registered memory
_NUM_WRITER_THREADS = 2


def extraction_layer_ids(settings: StreamSettings, *, num_hidden_layers: int) -> tuple[int, ...]:
    """Layers on the wire: the drafter's aux layers, then the state before the final norm (id
    `num_hidden_layers`).

    Raises:
        ConfigError: an aux layer the target does not have, or a layer named twice.
    """
    layer_ids = (*settings.aux_layer_ids, num_hidden_layers)
    bad = [layer for layer in settings.aux_layer_ids if not 1 <= layer < num_hidden_layers]
    if bad:
        raise ConfigError(
            "stream.aux_layer_ids names a layer the target does not have",
            got=", ".join(map(str, bad)),
            expected=f"1 to {num_hidden_layers - 1}",
        )
    if len(set(layer_ids)) != len(layer_ids):
        raise ConfigError("stream.aux_layer_ids names a layer twice", got=settings.aux_layer_ids)
    return layer_ids


def extraction_args(
    *,
    settings: StreamSettings,
    num_hidden_layers: int,
    store: StoreEndpoint,
    run_id: str,
    fingerprint: TargetFingerprint,
    segment_mib: int,
) -> tuple[list[str], dict[str, str]]:
    """vLLM arguments and environment that make an engine extract hidden states for one run.

    Args:
        segment_mib: store memory this engine contributes, MiB.

    Raises:
        ConfigError: layers the target does not have, or a store too small for the stream's budget.
    """
    layer_ids = extraction_layer_ids(settings, num_hidden_layers=num_hidden_layers)
    store_bytes, _ = budget_split(settings.budget_mib << 20)
    # Above 95 % the store refuses odd sizes through fragmentation; the budget has to be the tighter
    # bound.
    if store_bytes > 0.95 * (segment_mib << 20):
        raise ConfigError(
            "the store is smaller than the stream's budget allows",
            got=f"segment of {segment_mib} MiB for {store_bytes >> 20} MiB of samples",
            fix="Raise mooncake_segment_mib or lower stream.budget_mib.",
        )

    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
    }
    transfer = {
        "kv_connector": CONNECTOR_CLASS,
        "kv_role": "kv_producer",
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_connector_extra_config": {
            "mooncake": _mooncake_config(store, segment_mib),
            "stream": {
                "run_id": checked_name(run_id, what="the run id"),
                "fingerprint": fingerprint.model_dump(),
                "layer_ids": list(layer_ids),
                "dtype": settings.dtype,
                "budget_bytes": store_bytes,
                "orphan_ttl_s": settings.orphan_ttl_s,
            },
        },
    }

    args = [
        "--speculative-config",
        json.dumps(speculative),
        "--kv-transfer-config",
        json.dumps(transfer),
        # A prefix hit skips the forward pass that writes this request's states.
        "--no-enable-prefix-caching",
    ]

    return args, _environment(store)


def _mooncake_config(store: StoreEndpoint, segment_mib: int) -> dict[str, object]:
    return {
        "local_hostname": store.local_hostname,
        "master_server_address": store.master_address,
        "global_segment_size": segment_mib << 20,
        "local_buffer_size": _LOCAL_BUFFER_BYTES,
        "protocol": store.protocol,
        "device_name": store.rdma_devices,
        "num_writer_threads": _NUM_WRITER_THREADS,
    }


def _environment(store: StoreEndpoint) -> dict[str, str]:
    return {
        "MOONCAKE_LOCAL_HOSTNAME": store.local_hostname,
        "MC_LOG_LEVEL": "ERROR",  # the client logs every transfer session otherwise
        # vLLM on CPU keeps one core of two for itself unless told otherwise.
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        # An engine that waits for credits must leave its cores to the trainer, not spin on them.
        # Demo target, 2 cores, into the store: 2,322 tok/s alone; beside a busy two-thread process
        # 1,517, which keeps 0.29 of its own speed. Bound to one core: 1,633 alone; 1,513 and 0.35.
        # So both cores, and 5 ms of spinning.
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "5",
    }
