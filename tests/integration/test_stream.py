"""The stream on real parts: vLLM with our connector on a tiny target, a Mooncake master, states
against HF's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch

from components.errors import EngineError, StreamError
from components.hidden_states.launch import extraction_args
from components.hidden_states.store import StoreClient, count_run_keys
from components.hidden_states.stream import HiddenStateStream
from components.serving.engines.command import EngineSpec
from components.serving.engines.engine import Engine
from components.serving.engines.keeper import EngineKeeper
from components.serving.engines.pool import EnginePool
from components.settings import EngineSettings, StreamSettings
from tests.support.stream_services import (
    FINGERPRINT,
    Master,
    free_port,
    make_requests,
    running_master,
    wait_until,
)

pytestmark = pytest.mark.integration

RUN = "run-1"
ORPHAN_TTL_S = 10.0  # long enough to fill the budget in, on a slow machine too
SETTINGS = StreamSettings(
    aux_layer_ids=(1, 2),
    budget_mib=16,
    requests_in_flight=8,
    request_timeout_s=30,
    max_retries=1,
    check_every=1,
    min_lm_head_agreement=0.9,
    orphan_ttl_s=ORPHAN_TTL_S,
    engine_outage_s=60,
)
# Smaller than the longest prompts, so that chunked prefill is part of the test.
ENGINE = EngineSettings(
    device="cpu",
    max_model_len=1024,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    kv_cache_gib=0.25,
    startup_timeout_s=900,
)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with running_master(tmp_path_factory.mktemp("master")) as master:
        yield master


@pytest.fixture(scope="module")
def engine(
    master: Master, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with extraction_engine(
        master, tiny_target, tmp_path_factory.mktemp("engine"), SETTINGS
    ) as engine:
        yield engine


@contextlib.contextmanager
def extraction_engine(
    master: Master, target: Path, folder: Path, settings: StreamSettings
) -> Iterator[Engine]:
    spec = extraction_spec(master, target, settings)
    with Engine.start(spec, log_path=folder / "engine.log", fingerprint=None) as engine:
        yield engine.wait_ready()


def extraction_spec(master: Master, target: Path, settings: StreamSettings) -> EngineSpec:
    args, environment = extraction_args(
        settings=settings,
        num_hidden_layers=4,
        store=master.endpoint,
        run_id=RUN,
        fingerprint=FINGERPRINT,
        segment_mib=64,
    )
    return EngineSpec(
        name="extraction",
        model_path=str(target),
        served_model_name="t",
        settings=ENGINE,
        port=free_port(),
        device="cpu",
        extra_args=tuple(args),
        extra_env=environment,
        num_cores=1,
    )


@pytest.fixture
def stream(master: Master, engine: Engine, tiny_target: Path) -> HiddenStateStream:
    return stream_of(SETTINGS, master, engine, tiny_target)


def stream_of(
    settings: StreamSettings, master: Master, engine: Engine, target: Path
) -> HiddenStateStream:
    return HiddenStateStream(
        settings,
        engine_urls=[engine.url],
        model="t",
        store=master.endpoint,
        run_id=RUN,
        fingerprint=FINGERPRINT,
        num_hidden_layers=4,
        hidden_size=64,
        target_path=target,
    )


def hf_states(target: Path, token_ids: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """HF's states at layers 1, 2 and before the final norm, (T, 3, H), float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0][0].detach()))
    with torch.no_grad():
        states = model(
            torch.from_numpy(token_ids.astype(np.int64))[None], output_hidden_states=True
        ).hidden_states
    return torch.stack([states[1][0], states[2][0], last[0]], dim=1).float()


def relative_error(got_TLH: torch.Tensor, exact_TLH: torch.Tensor) -> torch.Tensor:
    return (got_TLH - exact_TLH).norm(dim=(0, 2)) / exact_TLH.norm(dim=(0, 2))


def test_states_equal_those_of_transformers(stream: HiddenStateStream, tiny_target: Path) -> None:
    """As exact as transformers itself in bfloat16: both against float32. A shifted layer would be
    off by 1 or more.
    """
    requests = make_requests(3, low=10, high=200) + make_requests(1, seed=3, low=700, high=701)
    with stream:
        for sample in stream.stream(requests):
            exact = hf_states(tiny_target, sample.request.token_ids, torch.float32)
            usual_L = relative_error(
                hf_states(tiny_target, sample.request.token_ids, torch.bfloat16), exact
            )
            error_L = relative_error(sample.states_TLH.float(), exact)
            assert (error_L < 1.5 * usual_L).all(), (
                f"{error_L.tolist()} against {usual_L.tolist()}, T = {len(exact)}"
            )
            assert usual_L.max() < 0.1
            sample.release()
    assert stream.report().num_samples == 4
    assert stream.report().num_retried == 0


def test_a_run_in_order_within_its_budget_on_no_disk(
    stream: HiddenStateStream, master: Master, engine: Engine
) -> None:
    written_before = bytes_written(engine)
    with stream:
        order, lengths = [], []
        for sample in stream.stream(make_requests(300, low=100, high=900)):
            order.append(sample.request.index)
            lengths.append(len(sample.request.token_ids))
            sample.release()
    report = stream.report()
    assert order == list(range(300))
    assert report.num_tokens == sum(lengths)
    assert report.keys_left == 0 == count_run_keys(master.endpoint, RUN)
    assert report.peak_bytes_held <= report.budget_bytes == 16 << 20
    # The budget was turned over, not just never reached.
    assert report.bytes_streamed > 3 * report.budget_bytes
    assert report.bytes_on_disk == 0
    assert report.num_quarantined == 0
    # The kernel's own count of what the engine's processes sent to storage: log lines, not states.
    assert bytes_written(engine) - written_before < 0.01 * report.bytes_streamed


def bytes_written(engine: Engine) -> int:
    root = psutil.Process(engine.identity.pid)
    return sum(
        process.io_counters().write_bytes for process in [root, *root.children(recursive=True)]
    )


def test_lm_head_agrees_with_the_engines_own_tokens(stream: HiddenStateStream) -> None:
    seen: list[dict[str, float]] = []
    stream._on_metrics = seen.append
    with stream:
        for sample in stream.stream(make_requests(40)):
            sample.release()
    assert stream._statistics.lm_head_share == pytest.approx(1.0, abs=0.05)
    # Random prompts are not the target's answers: reported, not enforced.
    assert stream._statistics.answer_share is not None and stream._statistics.answer_share < 0.5
    assert seen and seen[0]["stream_trainer_wait_share"] >= 0


@pytest.mark.long
def test_eight_bits_on_the_wire_halve_the_bytes_and_cost_what_they_say(
    master: Master, tiny_target: Path, tmp_path: Path
) -> None:
    # Random weights make near-ties of the logits, which eight bits decide anew.
    settings = SETTINGS.model_copy(update={"dtype": "float8_e4m3fn", "min_lm_head_agreement": 0.5})
    requests = make_requests(20, low=100, high=200)
    with extraction_engine(master, tiny_target, tmp_path, settings) as engine:
        with stream_of(settings, master, engine, tiny_target) as stream:
            for sample in stream.stream(requests):
                exact = hf_states(tiny_target, sample.request.token_ids, torch.float32)
                usual_L = relative_error(
                    hf_states(tiny_target, sample.request.token_ids, torch.bfloat16), exact
                )
                error_L = relative_error(sample.states_TLH.float(), exact)
                assert (error_L < (1.5 * usual_L).square().add(0.03**2).sqrt()).all(), (
                    error_L.tolist()
                )
                assert error_L.max() > 0.02  # they did travel in eight bits
                sample.release()
        report = stream.report()
        assert report.num_samples == 20 and report.keys_left == 0
        states_bytes = sum(len(request.token_ids) for request in requests) * 3 * 64
        assert states_bytes < report.bytes_streamed < 1.5 * states_bytes + 20 * 1400
        with (
            stream_of(SETTINGS, master, engine, tiny_target) as other,
            pytest.raises(StreamError, match="dtype"),
        ):
            next(other.stream(requests))


def test_a_prompt_longer_than_the_engine_takes_is_quarantined(stream: HiddenStateStream) -> None:
    requests = make_requests(5)
    requests[2] = make_requests(1, low=1024, high=1025)[0]
    with stream:
        assert len([sample.release() for sample in stream.stream(requests)]) == 4
    assert stream.report().quarantine_reasons == {"refused": 1}


def test_requests_without_a_name_or_with_a_bad_one_store_nothing(
    master: Master, engine: Engine
) -> None:
    body = {"model": "t", "prompt": [5, 6, 7], "max_tokens": 1}
    url = f"{engine.url}/v1/completions"
    assert httpx.post(url, json=body, timeout=300).json().get("kv_transfer_params") is None
    bad = body | {"kv_transfer_params": {"hidden_states_key": "../other"}}
    assert (
        "store key" in httpx.post(url, json=bad, timeout=300).json()["kv_transfer_params"]["error"]
    )
    assert count_run_keys(master.endpoint, RUN) == 0
    httpx.post(url, json=body, timeout=300).raise_for_status()  # and the engine lives


def put_by_hand(engine: Engine, name: str, *, num_tokens: int) -> None:
    ids = make_requests(1, low=num_tokens, high=num_tokens + 1)[0].token_ids.tolist()
    body = {
        "model": "t",
        "prompt": ids,
        "max_tokens": 1,
        "kv_transfer_params": {"hidden_states_key": name},
    }
    httpx.post(f"{engine.url}/v1/completions", json=body, timeout=300).raise_for_status()


def test_past_its_budget_the_engine_marks_instead_of_queueing_and_orphans_are_swept(
    master: Master, engine: Engine
) -> None:
    """Nobody reads. 7 of the 16 MiB are the store's; a sample of 1,000 tokens has 389 kB."""
    client = StoreClient.connect(master.endpoint)
    with contextlib.closing(client):
        with ThreadPoolExecutor(8) as pool:
            list(
                pool.map(
                    lambda number: put_by_hand(engine, f"orphan-{number}", num_tokens=1000),
                    range(24),
                )
            )
        keys: list[str] = []

        def all_there() -> bool:
            keys[:] = client.keys(f"{RUN}/orphan-")
            return len(keys) == 24

        wait_until(all_there, timeout_s=ORPHAN_TTL_S)
        errors = [key for key in keys if key.endswith(":error")]
        assert len(errors) == 24 - (7 << 20) // 389_120
        marker = client.read_small(errors[0])
        assert marker is not None and b"budget" in marker
        assert client.metrics().allocated_bytes <= 9 << 20
        wait_until(lambda: not client.keys(f"{RUN}/"), timeout_s=4 * ORPHAN_TTL_S)
    put_by_hand(engine, "after", num_tokens=10)  # the engine lives
    assert count_run_keys(master.endpoint, RUN) == 1
    wait_until(lambda: count_run_keys(master.endpoint, RUN) == 0, timeout_s=4 * ORPHAN_TTL_S)


def test_a_store_full_of_another_runs_keys_is_said_and_its_keys_are_left_alone(
    master: Master, tiny_target: Path, engine: Engine
) -> None:
    """Neither a sample nor the marker that says so may find room."""
    stream = stream_of(
        SETTINGS.model_copy(update={"request_timeout_s": 3}), master, engine, tiny_target
    )
    with other_run(master) as keys:
        with pytest.raises(StreamError, match=r"store full|the store is (9\d|100) % full"), stream:
            for sample in stream.stream(make_requests(8, low=300, high=900)):
                sample.release()
        assert stream.report().keys_left == 0
        client = StoreClient.connect(master.endpoint)
        with contextlib.closing(client):
            assert sorted(client.keys("other/")) == sorted(keys)
            client.remove_prefix("other/")
    with stream_of(SETTINGS, master, engine, tiny_target) as again:
        assert (
            len([sample.release() for sample in again.stream(make_requests(8, low=300, high=900))])
            == 8
        )


@contextlib.contextmanager
def other_run(master: Master) -> Iterator[list[str]]:
    """Pinned objects of another run until the store takes no more, down to the size of a marker or
    two.
    """
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    store = MooncakeDistributedStore()
    assert (
        store.setup(
            "127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master.endpoint.master_address
        )
        == 0
    )
    pinned = ReplicateConfig()
    keys = []
    pinned.with_hard_pin = True
    for size in (1 << 20, 1 << 16):
        while store.put(f"other/{len(keys)}", b"x" * size, pinned) == 0:
            keys.append(f"other/{len(keys)}")
    try:
        yield keys
    finally:
        threading.Thread(target=store.close, daemon=True).start()


def test_an_abandoned_run_leaves_nothing(
    stream: HiddenStateStream, master: Master, engine: Engine
) -> None:
    with pytest.raises(KeyboardInterrupt), stream:
        for sample in stream.stream(make_requests(100, low=300, high=900)):
            if sample.request.index == 3:
                raise KeyboardInterrupt
    assert stream.report().keys_left == 0
    time.sleep(1)
    assert count_run_keys(master.endpoint, RUN) == 0
    assert httpx.get(f"{engine.url}/health", timeout=60).is_success


@pytest.mark.long
def test_an_engine_killed_mid_batch_starts_again_and_no_sample_is_lost_or_given_twice(
    master: Master, tiny_target: Path, tmp_path: Path
) -> None:
    spec = extraction_spec(master, tiny_target, SETTINGS)
    requests = make_requests(120, low=100, high=300)
    order: list[int] = []
    with EnginePool(logs_dir=tmp_path, port_base=spec.port) as pool:
        engine = pool.start(
            "extract", lambda port: replace(spec, port=port), fingerprint=FINGERPRINT
        ).wait_ready()
        keeper = EngineKeeper(pool, "extract", engine)
        keeper.check()
        with checked_often(keeper), stream_of(SETTINGS, master, engine, tiny_target) as stream:
            for sample in stream.stream(requests):
                order.append(sample.request.index)
                if sample.request.index == 20:
                    kill_engine(engine)
                sample.release()
        report = stream.report()
    assert keeper.num_restarts == 1
    assert order == list(range(120))
    assert report.num_samples == 120 and report.num_quarantined == 0 and report.num_retried > 0
    assert report.keys_left == 0 and report.peak_bytes_held <= report.budget_bytes


@contextlib.contextmanager
def checked_often(keeper: EngineKeeper) -> Iterator[None]:
    """As the trainer's launcher asks it, about once a second."""
    ended = threading.Event()

    def check() -> None:
        while not ended.wait(0.5):
            keeper.check()

    thread = threading.Thread(target=check)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def kill_engine(engine: Engine) -> None:
    root = psutil.Process(engine.identity.pid)
    for process in [*root.children(recursive=True), root]:
        process.kill()


@pytest.mark.long
def test_a_killed_engine_that_stays_away_ends_the_stream_in_bounded_time(
    master: Master, engine: Engine, tiny_target: Path
) -> None:
    """Last: the engine does not come back."""
    settings = SETTINGS.model_copy(update={"engine_outage_s": 3})
    started = 0.0
    with (
        pytest.raises(EngineError, match="not reachable"),
        stream_of(settings, master, engine, tiny_target) as stream,
    ):
        for sample in stream.stream(make_requests(200, low=300, high=900)):
            if sample.request.index == 3:
                kill_engine(engine)
                started = time.monotonic()
            sample.release()
    assert time.monotonic() - started < 180
    assert count_run_keys(master.endpoint, RUN) == 0
