"""The stream: against the engine's own prefill, against speculators' loader, its read path, its
budget, its memory.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import torch

from components.contracts import StoreEndpoint, TargetFingerprint
from components.hidden_states.launch import extraction_args, extraction_layer_ids
from components.hidden_states.sample import SampleRequest
from components.hidden_states.store import StoreClient
from components.hidden_states.stream import HiddenStateStream
from components.serving.engines.command import EngineSpec
from components.serving.engines.engine import Engine
from components.settings import EngineSettings, StreamSettings, load_recipe
from components.system.ports import free_port
from components.targets.resolve import resolve_target
from tests.benchmarks.loop_figures import at_least, at_most
from tests.benchmarks.processes import last_json
from tests.benchmarks.run import Figure
from tests.support.stream_services import SimulatedEngine, running_master
from tests.support.tiny_target import make_tiny_target

FINGERPRINT = TargetFingerprint(
    weights="a" * 64, quantization="b" * 64, tokenizer="c" * 64, serving="d" * 64
)
RUN = "bench"
SEGMENT_MIB = 512
NUM_ROUNDS = 3
NUM_WORKERS = (1, 2, 4, 8)
MIB = 1 << 20


@dataclass(frozen=True)
class Target:
    """What is streamed: a target, its prompts, and how much of them at once."""

    path: Path
    num_layers: int
    hidden_size: int
    settings: StreamSettings
    engine: EngineSettings
    requests: tuple[SampleRequest, ...]

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of one round."""
        return sum(len(request.token_ids) for request in self.requests)


def run() -> list[Figure]:
    """All figures of the stream."""
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        folder = Path(name)
        return [
            *against_engine_and_loader(
                demo_target(folder), folder / "demo", loader_goal=1.25, label="demo"
            ),
            *against_engine_and_loader(
                tiny_target(folder),
                folder / "tiny",
                loader_goal=3.0,
                label="tiny",
                is_engine_bound=False,
            ),
            *read_path(folder),
            *budgets(folder),
            memory(folder),
        ]


def demo_target(folder: Path) -> Target:
    """The demo's target and settings, prompts as long as its conversations."""
    recipe = load_recipe("demo")
    found = resolve_target(recipe.target, cache_dir=folder / "targets", engine=recipe.engine)
    return Target(
        Path(found.path), 30, 576, recipe.stream, recipe.engine, _prompts(192, low=100, high=300)
    )


def tiny_target(folder: Path) -> Target:
    """A target so small that the engine's HTTP, not its model, takes the time."""
    recipe = load_recipe("demo")
    settings = recipe.stream.model_copy(update={"aux_layer_ids": (1, 2, 3)})
    path = make_tiny_target(folder / "tiny-target")
    return Target(path, 4, 64, settings, recipe.engine, _prompts(512, low=100, high=300))


def _prompts(num: int, *, low: int, high: int) -> tuple[SampleRequest, ...]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(low, high, num)
    ids = [rng.integers(3, 500, length).astype(np.int32) for length in lengths]
    return tuple(
        SampleRequest(index, f"s{index}", tokens, np.arange(len(tokens)) >= len(tokens) // 2)
        for index, tokens in enumerate(ids)
    )


def against_engine_and_loader(
    target: Target, folder: Path, *, loader_goal: float, label: str, is_engine_bound: bool = True
) -> list[Figure]:
    """Tokens per second to a trainer that costs nothing; rounds of the engine alone between those
    of the stream.

    Against an engine that does nothing but answer HTTP, what a sample costs besides is told, and no
    goal is set.
    """
    folder.mkdir()
    with running_master(folder) as master:
        with (
            _engine(target, master.endpoint, folder, stored=True) as ours,
            _engine(target, None, folder) as plain,
        ):
            streamed, alone, waits = [], [], []
            for _ in range(NUM_ROUNDS + 1):
                streamed.append(_streamed(target, master.endpoint, ours.url))
                alone.append(asyncio.run(_prefilled(target, plain.url)))
            waits.append(
                _wait_share(
                    target, master.endpoint, ours.url, tokens_per_s=statistics.median(streamed) / 2
                )
            )
        loader = _best_loader(target, master.endpoint, folder)
    # The first round warms both up.
    mine, engine = (
        statistics.median(streamed[1:]),
        statistics.median(alone[1:]),
    )
    return [
        at_least(f"{label}_over_engine_alone", mine / engine, 0.93, "x")
        if is_engine_bound
        else Figure(
            name=f"{label}_over_engine_alone", value=mine / engine, unit="x", goal="-", ok=True
        ),
        at_least(f"{label}_over_speculators_loader", mine / loader, loader_goal, "x"),
        at_most(f"{label}_trainer_wait_share", max(waits), 0.05, "of_wall_time"),
        Figure(name=f"{label}_stream", value=mine, unit="tok/s", goal="-", ok=True),
        Figure(name=f"{label}_speculators_loader", value=loader, unit="tok/s", goal="-", ok=True),
    ]


@contextmanager
def _engine(
    target: Target, store: StoreEndpoint | None, folder: Path, *, stored: bool = False
) -> Iterator[Engine]:
    args: list[str] = ["--no-enable-prefix-caching"]
    environment: dict[str, str] = {}
    if stored and store is not None:
        args, environment = extraction_args(
            settings=target.settings, num_hidden_layers=target.num_layers, store=store, run_id=RUN,
            fingerprint=FINGERPRINT, segment_mib=SEGMENT_MIB,
        )  # fmt: skip
    spec = EngineSpec(
        name="bench",
        model_path=str(target.path),
        served_model_name="t",
        settings=target.engine,
        port=free_port(),
        device="cpu",
        extra_args=tuple(args),
        extra_env=environment,
    )
    log = folder / f"engine-{spec.port}.log"
    with Engine.start(spec, log_path=log, fingerprint=None).wait_ready() as running:
        yield running


def _stream(target: Target, store: StoreEndpoint, url: str) -> HiddenStateStream:
    return HiddenStateStream(
        target.settings,
        engine_urls=[url],
        model="t",
        store=store,
        run_id=RUN,
        fingerprint=FINGERPRINT,
        num_hidden_layers=target.num_layers,
        hidden_size=target.hidden_size,
        target_path=target.path,
    )


def _streamed(target: Target, store: StoreEndpoint, url: str) -> float:
    with _stream(target, store, url) as stream:
        started = time.perf_counter()
        for sample in stream.stream(target.requests):
            sample.release()
        return target.num_tokens / (time.perf_counter() - started)


def _wait_share(target: Target, store: StoreEndpoint, url: str, *, tokens_per_s: float) -> float:
    """What a trainer waits that takes twice as long for a token as the stream; it sleeps, as one on
    a GPU would.
    """
    with _stream(target, store, url) as stream:
        for sample in stream.stream(target.requests):
            time.sleep(len(sample.request.token_ids) / tokens_per_s)
            sample.release()
        return stream.report().trainer_wait_share


async def _prefilled(target: Target, url: str) -> float:
    """Tokens per second of the same prompts on an engine that keeps nothing of them."""
    slots = asyncio.Semaphore(target.settings.requests_in_flight)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:

        async def one(token_ids: list[int]) -> None:
            async with slots:
                body = {"model": "t", "prompt": token_ids, "max_tokens": 1, "temperature": 0.0}
                (await client.post("/v1/completions", json=body)).raise_for_status()

        started = time.perf_counter()
        await asyncio.gather(*(one(request.token_ids.tolist()) for request in target.requests))
        return target.num_tokens / (time.perf_counter() - started)


def _best_loader(target: Target, store: StoreEndpoint, folder: Path) -> float:
    """speculators' own loader at its best number of workers, on an engine with the connector it was
    written for.
    """
    from datasets import Dataset

    rows = [
        {
            "input_ids": request.token_ids.tolist(),
            "loss_mask": request.loss_mask.astype(int).tolist(),
            "seq_len": len(request.token_ids),
        }
        for request in target.requests
    ]
    # Three rounds: eight workers have 32 batches on order, which count for nothing at either end.
    data = Dataset.from_list(rows * 3).with_format("torch", columns=["input_ids", "loss_mask"])
    data.save_to_disk(str(folder / "rows"))
    with _upstream_engine(target, store, folder) as running:
        rates = {
            number: last_json(
                [
                    sys.executable,
                    "-m",
                    "tests.benchmarks.stream_upstream",
                    str(folder / "rows"),
                    running.url,
                    store.master_address,
                    str(target.hidden_size),
                    str(len(target.settings.aux_layer_ids)),
                    str(number),
                ],
            )["tokens_per_s"]
            for number in NUM_WORKERS
        }
    print(f"speculators' loader, tok/s by workers: {rates}", file=sys.stderr)
    return max(rates.values())


@contextmanager
def _upstream_engine(target: Target, store: StoreEndpoint, folder: Path) -> Iterator[Engine]:
    layer_ids = extraction_layer_ids(target.settings, num_hidden_layers=target.num_layers)
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
    }
    transfer = {
        "kv_connector": "CpuMooncakeConnector",
        "kv_role": "kv_producer",
        "kv_connector_module_path": "tests.benchmarks.cpu_mooncake_connector",
        "kv_connector_extra_config": {
            "mooncake": {
                "local_hostname": "127.0.0.1",
                "master_server_address": store.master_address,
                "global_segment_size": SEGMENT_MIB * MIB,
                "local_buffer_size": 16 * MIB,
                "num_writer_threads": 2,
            }
        },
    }
    # All that `extraction_args` gives an engine besides the connector.
    args, environment = extraction_args(
        settings=target.settings, num_hidden_layers=target.num_layers, store=store, run_id=RUN,
        fingerprint=FINGERPRINT, segment_mib=SEGMENT_MIB,
    )  # fmt: skip
    args[args.index("--speculative-config") + 1] = json.dumps(speculative)
    args[args.index("--kv-transfer-config") + 1] = json.dumps(transfer)
    spec = EngineSpec(
        name="upstream",
        model_path=str(target.path),
        served_model_name="t",
        settings=target.engine,
        port=free_port(),
        device="cpu",
        extra_args=tuple(args),
        extra_env=environment,
    )
    with Engine.start(
        spec, log_path=folder / "upstream.log", fingerprint=None
    ).wait_ready() as running:
        yield running


def read_path(folder: Path) -> list[Figure]:
    """Samples of 8 MB out of the store: `StoreClient.read_into` against bare `get_into`, and
    against memcpy.
    """
    num = 8
    num_bytes = 8 * MIB
    with running_master(_new(folder / "read")) as master, _writer(master.endpoint) as store:
        data = bytes(np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8))
        for index in range(num):
            assert store.put(f"sample-{index}", data) == 0
        client = StoreClient.connect(master.endpoint)
        buffer = torch.empty(num * num_bytes, dtype=torch.uint8)
        other = torch.empty(num * num_bytes, dtype=torch.uint8)
        client.register(buffer)
        places = [
            (f"sample-{index}", buffer.data_ptr() + index * num_bytes) for index in range(num)
        ]
        bare, ours, copied = [], [], []
        for _ in range(11):
            bare.append(
                _timed(
                    lambda: [client._store.get_into(key, place, num_bytes) for key, place in places]
                )
            )
            ours.append(
                _timed(lambda: [client.read_into(key, place, num_bytes) for key, place in places])
            )
            copied.append(_timed(lambda: other.copy_(buffer)))
        client.unregister(buffer)
        client.close()
    rate = num * num_bytes / statistics.median(ours) / 2**30
    return [
        at_least(
            "read_path_over_bare", statistics.median(bare) / statistics.median(ours), 0.95, "x"
        ),
        Figure(name="read_path", value=rate, unit="GiB/s", goal="-", ok=True),
        Figure(
            name="read_path_over_memcpy",
            value=statistics.median(copied) / statistics.median(ours),
            unit="x",
            goal="-",
            ok=True,
        ),
    ]


def budgets(folder: Path) -> list[Figure]:
    """The most that store and buffers held, sampled all the time, with a slow consumer and engines
    that never stop.
    """
    figures = []
    for budget_mib in (64, 256, 1024):
        with running_master(_new(folder / f"budget-{budget_mib}")) as master:
            most = _most_held(master.endpoint, budget_mib)
        figures.append(
            at_most(f"peak_bytes_held_at_{budget_mib}_mib", most / MIB, budget_mib, "MiB")
        )
    return figures


def _most_held(store: StoreEndpoint, budget_mib: int) -> float:
    hidden_size = 2048
    layer_ids = (1, 2, 3, 4)
    settings = StreamSettings(
        aux_layer_ids=layer_ids[:-1], budget_mib=budget_mib, requests_in_flight=64
    )
    num = 2 * budget_mib * MIB // (200 * len(layer_ids) * hidden_size * 2)
    engine = SimulatedEngine(
        store,
        run_id=RUN,
        layer_ids=layer_ids,
        hidden_size=hidden_size,
        segment_mib=budget_mib + 64,
        local_buffer_mib=512,
    )
    watch = _Watch(store)
    try:
        with HiddenStateStream(
            settings, engine_urls=[engine.url], model="t", store=store, run_id=RUN,
            fingerprint=FINGERPRINT,
            num_hidden_layers=4, hidden_size=hidden_size,
        ) as stream, watch:  # fmt: skip
            for sample in stream.stream(_prompts(num, low=100, high=300)):
                time.sleep(0.03)  # slower than the engine: everything fills up
                sample.release()
            return max(stream.report().peak_bytes_held, watch.most_bytes)
    finally:
        engine.close()


class _Watch:
    """Looks at the master's allocated bytes every few milliseconds."""

    def __init__(self, store: StoreEndpoint) -> None:
        self._client = StoreClient.connect(store)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.most_bytes = 0

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._client.close()

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            self.most_bytes = max(self.most_bytes, self._client.metrics().allocated_bytes)


def memory(folder: Path) -> Figure:
    """Resident memory of a consumer after 20,000 samples against that after 1,000."""
    with running_master(_new(folder / "memory")) as master:
        engine = SimulatedEngine(master.endpoint, run_id=RUN)
        try:
            sizes = last_json(
                [
                    sys.executable, "-m", "tests.benchmarks.stream_consumer", engine.url,
                    master.endpoint.master_address, master.endpoint.metrics_url,
                ],
            )  # fmt: skip
        finally:
            engine.close()
    return at_most(
        "memory_growth_1k_to_20k_samples",
        sizes["after_20k"] / sizes["after_1k"] - 1,
        0.05,
        "of_its_size",
    )


@contextmanager
def _writer(endpoint: StoreEndpoint) -> Iterator[object]:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    status = store.setup(
        "127.0.0.1", "P2PHANDSHAKE", 128 * MIB, 16 * MIB, "tcp", "", endpoint.master_address
    )
    assert status == 0
    yield store
    threading.Thread(target=store.close, daemon=True).start()


def _timed(work: object) -> float:
    started = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - started


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder
