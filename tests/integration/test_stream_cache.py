"""Hybrid and offline reading, on a real store: filled by the stream, read without an engine, never
another target's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from components.errors import FingerprintMismatchError, StreamError
from components.hidden_states.stream import HiddenStateStream, SampleRequest
from components.settings import StreamSettings
from tests.support.stream_services import (
    FINGERPRINT,
    Master,
    SimulatedEngine,
    make_requests,
    running_master,
    simulated_states,
)

pytestmark = pytest.mark.integration

RUN = "cache"
NUM = 40


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with running_master(tmp_path_factory.mktemp("master")) as master:
        yield master


@pytest.fixture
def engine(master: Master) -> Iterator[SimulatedEngine]:
    engine = SimulatedEngine(master.endpoint, run_id=RUN)
    try:
        yield engine
    finally:
        engine.close()


def settings(mode: str, folder: Path, **values: object) -> StreamSettings:
    return StreamSettings.model_validate(
        {
            "aux_layer_ids": (1, 2),
            "budget_mib": 16,
            "requests_in_flight": 8,
            "mode": mode,
            "cache_dir": str(folder),
        }
        | values
    )


def open_stream(master: Master, urls: tuple[str, ...], chosen: StreamSettings) -> HiddenStateStream:
    return HiddenStateStream(
        chosen,
        engine_urls=urls,
        model="t",
        store=master.endpoint,
        run_id=RUN,
        fingerprint=FINGERPRINT,
        num_hidden_layers=4,
        hidden_size=64,
    )


def consume(stream: HiddenStateStream, requests: list[SampleRequest]) -> list[int]:
    order = []
    for sample in stream.stream(requests):
        expected = simulated_states(sample.request.token_ids, num_layers=3, hidden_size=64)
        assert torch.equal(sample.states_TLH, expected)
        order.append(sample.request.index)
        sample.release()
    return order


def test_the_second_pass_comes_from_the_disk_and_the_third_needs_no_engine(
    master: Master, engine: SimulatedEngine, tmp_path: Path
) -> None:
    requests = make_requests(NUM)
    with open_stream(master, (engine.url,), settings("hybrid", tmp_path)) as stream:
        assert consume(stream, requests) == list(range(NUM))
        assert consume(stream, requests[::-1]) == list(range(NUM))[::-1]
    report = stream.report()
    assert engine.num_calls == NUM
    assert (report.num_samples, report.num_cached, report.keys_left) == (2 * NUM, NUM, 0)
    assert report.cache_bytes == report.bytes_streamed > 0
    assert report.peak_bytes_held <= report.budget_bytes
    engine.close()
    with open_stream(master, (), settings("offline", tmp_path)) as offline:
        offline.require_cached(requests)
        assert consume(offline, requests) == list(range(NUM))
    assert offline.report().num_cached == NUM and offline.report().bytes_streamed == 0


def test_a_full_cache_leaves_the_rest_to_the_engine(
    master: Master, engine: SimulatedEngine, tmp_path: Path
) -> None:
    requests = make_requests(NUM)
    limit = settings("hybrid", tmp_path, cache_gib=0.001)
    with open_stream(master, (engine.url,), limit) as stream:
        for _ in range(2):
            assert consume(stream, requests) == list(range(NUM))
    report = stream.report()
    assert 0 < report.num_cached < NUM and engine.num_calls == 2 * NUM - report.num_cached
    assert report.cache_bytes <= 0.001 * 2**30
    with open_stream(master, (), settings("offline", tmp_path)) as offline:
        num_missing = NUM - report.num_cached
        with pytest.raises(
            StreamError, match=rf"{num_missing} of {NUM} samples are not among the cached.*hybrid"
        ):
            offline.require_cached(requests)
        with pytest.raises(StreamError, match=r"not among the cached states.*hybrid"):
            consume(offline, requests)


def test_a_damaged_sample_is_given_up_once_and_streamed_the_next_time(
    master: Master, engine: SimulatedEngine, tmp_path: Path
) -> None:
    requests = make_requests(NUM)
    with open_stream(master, (engine.url,), settings("hybrid", tmp_path)) as stream:
        consume(stream, requests)
    (path,) = tmp_path.rglob("*.bin")
    data = bytearray(path.read_bytes())
    data[2000] ^= 16  # in the states of the first sample
    path.write_bytes(data)
    with open_stream(master, (engine.url,), settings("hybrid", tmp_path)) as stream:
        assert consume(stream, requests) == list(range(1, NUM))
        assert consume(stream, requests) == list(range(NUM))
    report = stream.report()
    assert report.quarantine_reasons == {"cache": 1}
    assert engine.num_calls == NUM + 1


def test_another_layer_list_is_refused_by_name(
    master: Master, engine: SimulatedEngine, tmp_path: Path
) -> None:
    with open_stream(master, (engine.url,), settings("hybrid", tmp_path)) as stream:
        consume(stream, make_requests(4))
    with pytest.raises(FingerprintMismatchError, match="of another layer_ids"):
        open_stream(master, (), settings("offline", tmp_path, aux_layer_ids=(1, 3))).__enter__()


@pytest.mark.parametrize(
    ("mode", "folder"), [("online", "somewhere"), ("hybrid", None), ("offline", None)]
)
def test_mode_and_folder_belong_together(mode: str, folder: str | None) -> None:
    with pytest.raises(ValueError, match="cache_dir"):
        StreamSettings.model_validate({"aux_layer_ids": (1, 2), "mode": mode, "cache_dir": folder})
