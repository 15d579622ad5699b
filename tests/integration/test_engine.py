"""A real vLLM engine on a tiny random target: start, answer, stop, and every way of not coming
up.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from components.contracts import TargetFingerprint
from components.errors import EngineError, PortInUseError
from components.serving.engines.command import EngineSpec
from components.serving.engines.engine import Engine, spec_decode_counters, stop_engine
from components.settings import EngineSettings
from components.system import guard
from components.system.ports import free_port

pytestmark = pytest.mark.integration

FINGERPRINT = TargetFingerprint(
    weights="0" * 64, quantization="1" * 64, tokenizer="2" * 64, serving="3" * 64
)
SETTINGS = EngineSettings(
    device="cpu",
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    kv_cache_gib=0.1,
    startup_timeout_s=900,
)
ORPHAN_LIMIT_S = 60.0  # an engine has ten seconds for its own end; the rest is for a slow machine

OWNER = """
import sys, time
from pathlib import Path
from components.serving.engines.command import EngineSpec
from components.serving.engines.engine import Engine
from components.settings import EngineSettings
settings = EngineSettings.model_validate_json(sys.argv[1])
model, port = sys.argv[2], int(sys.argv[3])
spec = EngineSpec(name="owned", model_path=model, served_model_name="m",
                  settings=settings, port=port, device="cpu")
engine = Engine.start(spec, log_path=Path(sys.argv[4]), fingerprint=None)
print(engine.identity.pid, flush=True)
engine.wait_ready()
print("ready", flush=True)
time.sleep(600)
"""


def make_spec(
    model: Path, *, settings: EngineSettings = SETTINGS, port: int | None = None
) -> EngineSpec:
    return EngineSpec(
        name="tiny",
        model_path=str(model),
        served_model_name="tiny",
        settings=settings,
        port=port or free_port(),
        device="cpu",
        num_cores=1,
    )


def test_engine_answers_counts_and_leaves_nothing(tiny_target: Path, tmp_path: Path) -> None:
    spec = make_spec(tiny_target)
    with Engine.start(spec, log_path=tmp_path / "engine.log", fingerprint=FINGERPRINT) as engine:
        pid = engine.identity.pid
        with pytest.raises(PortInUseError):  # remembered before the engine has bound it
            Engine.start(spec, log_path=tmp_path / "second.log", fingerprint=FINGERPRINT)
        assert engine.wait_ready().is_alive()
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 5,
            "ignore_eos": True,
        }
        answer = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert spec_decode_counters(engine.url)["generation_tokens"] == 5
        assert_seeds_are_served(engine)
        assert_idle_connection_is_kept(engine)
        members = guard.session_members(pid)
        assert len(members) >= 2
    assert not engine.is_alive()
    assert [member for member in members if guard.process_start(member) is not None] == []
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{engine.url}/health")


def assert_seeds_are_served(engine: Engine) -> None:
    """vLLM 0.32 on CPU ends where a seeded prompt is computed in several steps, as some of eight
    at once are here; the plug-in repairs that for engines without a drafter, too.
    """

    def ask(seed: int) -> int:
        # Other tokens in each: what the prefix cache holds is not computed again.
        ids = [3 + (50 * seed + place) % 400 for place in range(200)]
        body = {"model": "tiny", "prompt": ids, "max_tokens": 4, "temperature": 1.0, "seed": seed}
        return httpx.post(f"{engine.url}/v1/completions", json=body, timeout=600).status_code

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [200] * 8
    assert engine.is_alive()


def assert_idle_connection_is_kept(engine: Engine) -> None:
    """vLLM closes one after 5 s, which is when httpx stops using it: requests of a measurement were
    lost at times.
    """
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", engine.spec.port, timeout=300)
    ) as connection:
        connection.request("GET", "/v1/models")
        assert connection.getresponse().read()
        time.sleep(6)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().read()


def test_another_process_can_end_it(tiny_target: Path, tmp_path: Path) -> None:
    engine = Engine.start(
        make_spec(tiny_target), log_path=tmp_path / "engine.log", fingerprint=FINGERPRINT
    )
    identity = engine.identity
    time.sleep(2)  # in the middle of its start
    members = guard.session_members(identity.pid)
    assert stop_engine(identity)
    assert not engine.is_alive()
    assert [member for member in members if guard.process_start(member) is not None] == []
    assert not stop_engine(identity)
    engine.stop()


def test_startup_timeout_is_one_clear_error(tiny_target: Path, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"startup_timeout_s": 1.0})
    engine = Engine.start(
        make_spec(tiny_target, settings=settings), log_path=tmp_path / "e.log", fingerprint=None
    )
    with pytest.raises(EngineError, match=r"was not ready in 1 s.*e\.log"):
        engine.wait_ready()
    assert not engine.is_alive()
    assert guard.session_members(engine._process.pid) == []


def test_broken_target_is_reported_with_its_cause(tiny_target: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "no-such-model"}')
    engine = Engine.start(make_spec(broken), log_path=tmp_path / "engine.log", fingerprint=None)
    with pytest.raises(EngineError, match="ended before it was ready") as caught:
        engine.wait_ready()
    assert "no-such-model" in str(caught.value)
    assert len(str(caught.value)) < 1500


def test_port_of_another_process(tiny_target: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortInUseError, match=str(port)):
            Engine.start(
                make_spec(tiny_target, port=port),
                log_path=tmp_path / "engine.log",
                fingerprint=None,
            )
    assert not (tmp_path / "engine.log").exists()


@pytest.mark.long
@pytest.mark.parametrize("when", ["starting", "ready"])
def test_nothing_survives_the_kill_of_its_owner(
    tiny_target: Path, tmp_path: Path, when: str
) -> None:
    arguments = [
        SETTINGS.model_dump_json(),
        str(tiny_target),
        str(free_port()),
        str(tmp_path / "engine.log"),
    ]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    try:
        guard_pid = int(owner.stdout.readline())
        if when == "ready":
            assert owner.stdout.readline().strip() == "ready", (
                tmp_path / "engine.log"
            ).read_text()[-2000:]
        else:
            time.sleep(5)
        members = [guard_pid, *guard.session_members(guard_pid)]
        assert len(members) >= 2
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert_gone(members, limit_s=ORPHAN_LIMIT_S)
    finally:
        owner.kill()
        owner.stdout.close()


@pytest.mark.long
def test_nothing_survives_the_kill_of_its_guard(tiny_target: Path, tmp_path: Path) -> None:
    engine = Engine.start(
        make_spec(tiny_target), log_path=tmp_path / "engine.log", fingerprint=None
    ).wait_ready()
    members = guard.session_members(engine.identity.pid)
    os.kill(engine.identity.pid, signal.SIGKILL)
    assert_gone(members, limit_s=ORPHAN_LIMIT_S)
    engine.stop()


def assert_gone(pids: list[int], *, limit_s: float) -> None:
    starts = {pid: guard.process_start(pid) for pid in pids}
    deadline = time.monotonic() + limit_s
    while left := [
        pid
        for pid in pids
        if guard.process_start(pid) is not None and guard.process_start(pid) == starts[pid]
    ]:
        assert time.monotonic() < deadline, f"still there after {limit_s} s: {left}"
        time.sleep(0.2)
