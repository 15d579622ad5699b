"""speculators' own online loader, as it stands.

    python -m tests.benchmarks.stream_upstream ROWS ENGINE MASTER HIDDEN LAYERS WORKERS

Prints one JSON line: tokens per second in the steady state. Left out are the batches that the
workers brought while they started, and those of the end, where some have nothing left to do.
"""

from __future__ import annotations

import json
import sys
import time

BATCH_TOKENS = 768
"""Of a packed batch: the demo trainer's packs, two at a time."""
PREFETCH = 4
"""Batches on order per worker, as speculators sets it."""


def main(
    rows: str, engine_url: str, master: str, hidden_size: int, num_layers: int, num_workers: int
) -> float:
    """Tokens per second of one pass, between the first and the last batches of every worker."""
    import torch
    from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig
    from hs_connectors.transfer import MooncakeTransfer
    from speculators.train.data import ArrowDataset
    from speculators.train.dataloader import _setup_dataloader

    store = MooncakeHiddenStatesStore(
        MooncakeStoreConfig(
            local_hostname="127.0.0.1", master_server_address=master, global_segment_size=16 << 20,
            local_buffer_size=64 << 20,
        )
    )  # fmt: skip
    data = ArrowDataset(
        max_len=BATCH_TOKENS,
        datapath=rows,
        transfer=MooncakeTransfer(store),
        vllm_endpoint=f"{engine_url}/v1",
        hidden_states_dtype=torch.bfloat16,
    )
    loader = _setup_dataloader(
        data,
        total_seq_len=BATCH_TOKENS,
        hidden_size=hidden_size,
        num_workers=num_workers,
        num_target_layers=num_layers,
    )
    arrivals = [(time.perf_counter(), int((batch["document_ids"] >= 0).sum())) for batch in loader]
    # Each worker has PREFETCH batches on order: before the first of them, and once no new ones are
    # ordered, what arrives was in part made earlier.
    first = PREFETCH * num_workers
    last = len(arrivals) - PREFETCH * num_workers
    assert last - first >= 20, f"{len(arrivals)} batches are too few for {num_workers} workers"
    return sum(tokens for _, tokens in arrivals[first + 1 : last]) / (
        arrivals[last - 1][0] - arrivals[first][0]
    )


if __name__ == "__main__":
    rate = main(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:7]))
    print(json.dumps({"tokens_per_s": rate}))
