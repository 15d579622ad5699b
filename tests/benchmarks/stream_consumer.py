"""A consumer of 20,000 small samples:
`python -m tests.benchmarks.stream_consumer ENGINE MASTER METRICS`.

Prints one JSON line: its resident memory, bytes, after 1,000 samples and at the end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import numpy as np
import psutil

from components.contracts import StoreEndpoint
from components.hidden_states.sample import SampleRequest
from components.hidden_states.stream import HiddenStateStream
from components.settings import StreamSettings
from tests.benchmarks.bench_stream import FINGERPRINT, RUN


def requests(num: int) -> Iterator[SampleRequest]:
    """Prompts of 16 to 48 tokens, one after the other."""
    rng = np.random.default_rng(0)
    for index in range(num):
        ids = rng.integers(3, 500, rng.integers(16, 48)).astype(np.int32)
        yield SampleRequest(index, f"s{index}", ids, np.arange(len(ids)) >= len(ids) // 2)


def main(engine_url: str, master: str, metrics: str) -> dict[str, int]:
    """Stream, and look at the memory twice."""
    settings = StreamSettings(aux_layer_ids=(1, 2), budget_mib=16, requests_in_flight=16)
    process = psutil.Process()
    sizes = {}
    with HiddenStateStream(
        settings, engine_urls=[engine_url], model="t",
        store=StoreEndpoint(master_address=master, metrics_url=metrics),
        run_id=RUN, fingerprint=FINGERPRINT, num_hidden_layers=4, hidden_size=64,
    ) as stream:  # fmt: skip
        for number, sample in enumerate(stream.stream(requests(20_000)), start=1):
            sample.release()
            if number == 1_000:
                sizes["after_1k"] = process.memory_info().rss
    return {**sizes, "after_20k": process.memory_info().rss}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:4])))
