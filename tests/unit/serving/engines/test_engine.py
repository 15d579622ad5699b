"""Parts of the engine that need no vLLM: binding, ports, log lines, counters, the guard."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.contracts import FINGERPRINT_FILE, CheckpointRef, TargetFingerprint
from components.errors import ConfigError, FingerprintMismatchError, PortInUseError
from components.serving.engines.command import EngineSpec
from components.serving.engines.engine import (
    Engine,
    check_binding,
    check_port_free,
    free_port,
    parse_counters,
    telling_lines,
)
from components.settings import EngineSettings
from components.system import guard

FINGERPRINT = TargetFingerprint(
    weights="0" * 64, quantization="1" * 64, tokenizer="2" * 64, serving="3" * 64
)
OTHER = FINGERPRINT.model_copy(update={"weights": "f" * 64})

LOG = """\
(APIServer pid=1) INFO 11-29 20:30:32 [api_utils.py:347] version 0.32.0
(EngineCore pid=2) ERROR 11-29 20:30:40 [core.py:1] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-29 20:30:40 [core.py:1] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-29 20:30:40 [core.py:1]   File "core.py", line 1, in run
(EngineCore pid=2) ERROR 11-29 20:30:40 [core.py:1] ValueError: Available memory is less than requested.
(EngineCore pid=2) ValueError: Available memory is less than requested.
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
nanobind: leaked 4 instances!
"""

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 2.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+02
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
"""


def make_checkpoint(folder: Path, *, written: TargetFingerprint = FINGERPRINT) -> CheckpointRef:
    written.write(folder / FINGERPRINT_FILE)
    return CheckpointRef(
        path=str(folder),
        digest="d" * 64,
        algorithm="dspark",
        fingerprint=FINGERPRINT,
        num_draft_tokens=4,
    )


def make_spec(checkpoint: CheckpointRef | None = None) -> EngineSpec:
    return EngineSpec(
        name="one",
        model_path="/none",
        served_model_name="m",
        settings=EngineSettings(),
        port=free_port(),
        device="cpu",
        checkpoint=checkpoint,
    )


def test_binding_holds_for_its_own_target(tmp_path: Path) -> None:
    check_binding(make_checkpoint(tmp_path), FINGERPRINT)


@pytest.mark.parametrize("target", [OTHER, None])
def test_binding_to_another_target(tmp_path: Path, target: TargetFingerprint | None) -> None:
    checkpoint = make_checkpoint(tmp_path)
    with pytest.raises(FingerprintMismatchError, match="weights"):
        check_binding(checkpoint, target)
    with pytest.raises(FingerprintMismatchError):
        Engine.start(make_spec(checkpoint), log_path=tmp_path / "e.log", fingerprint=target)
    assert not (tmp_path / "e.log").exists()


def test_the_file_in_the_folder_counts_not_only_the_record(tmp_path: Path) -> None:
    with pytest.raises(FingerprintMismatchError):
        check_binding(make_checkpoint(tmp_path, written=OTHER), FINGERPRINT)
    (tmp_path / FINGERPRINT_FILE).unlink()
    with pytest.raises(ConfigError, match=r"TargetFingerprint .*missing"):
        check_binding(
            make_checkpoint(tmp_path).model_copy(update={"path": str(tmp_path / "no")}), FINGERPRINT
        )


def test_ports() -> None:
    port = free_port()
    check_port_free(port, name="x")
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(PortInUseError, match=str(port)):
            check_port_free(port, name="x")
        assert free_port(port) > port


def test_telling_lines_are_few_and_hold_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "e.log"
    log.write_text(LOG)
    assert telling_lines(log) == ["ValueError: Available memory is less than requested."]
    log.write_text("starting\nstill starting\n")
    assert telling_lines(log) == ["still starting"]
    assert telling_lines(tmp_path / "none.log") == []


def test_counters() -> None:
    assert parse_counters(METRICS) == {
        "spec_decode_num_drafts": 15.0,
        "spec_decode_num_accepted_tokens_per_pos.0": 4.0,
        "spec_decode_num_accepted_tokens_per_pos.1": 2.0,
        "generation_tokens": 150.0,
    }


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
subprocess.Popen(child, start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""


def start_guard(owner_file: Path, owner_pid: int, *command: str) -> subprocess.Popen[str]:
    guard.write_owner(owner_file, owner_pid)
    arguments = [sys.executable, "-I", str(guard.__file__), str(owner_file), "0.5", *command]
    return subprocess.Popen(arguments, start_new_session=True, stdout=subprocess.PIPE, text=True)


def test_guard_ends_what_ignores_signals_and_left_its_session(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with start_guard(tmp_path / "owner", owner.pid, sys.executable, "-c", STUBBORN) as watched:
        assert watched.stdout is not None and watched.stdout.readline() == "up\n"
        members = guard.session_members(watched.pid)
        assert len(members) == 2
        owner.kill()
        assert watched.wait(timeout=120) == 128 + signal.SIGKILL
    owner.wait()
    assert [pid for pid in members if guard.process_start(pid) is not None] == []


def test_guard_passes_on_the_exit_code(tmp_path: Path) -> None:
    with start_guard(
        tmp_path / "owner", os.getpid(), sys.executable, "-c", "raise SystemExit(7)"
    ) as watched:
        assert watched.wait(timeout=120) == 7


def test_sockets_lie_in_a_folder_that_goes_with_the_guard(tmp_path: Path) -> None:
    leave = (
        "import os, pathlib; folder = pathlib.Path(os.environ['VLLM_RPC_BASE_PATH']); "
        "(folder / 'socket').touch()"
    )
    with start_guard(
        tmp_path / "owner", os.getpid(), sys.executable, "-c", f"{leave}; print(folder)"
    ) as watched:
        assert watched.stdout is not None
        folder = Path(watched.stdout.read().strip())
        assert watched.wait(120) == 0
    assert folder.name.startswith("engine-") and not folder.exists()


def test_guard_of_a_recycled_pid_ends_at_once(tmp_path: Path) -> None:
    owner_file = tmp_path / "owner"
    owner_file.write_text(f"{os.getpid()} 1\n")
    arguments = [sys.executable, "-I", str(guard.__file__), str(owner_file), "0.5", "sleep", "600"]
    begin = time.monotonic()
    subprocess.run(arguments, start_new_session=True, timeout=300, check=False)
    assert time.monotonic() - begin < 120


def test_guard_follows_a_new_owner(tmp_path: Path) -> None:
    first, second = (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)
    )
    with start_guard(tmp_path / "owner", first.pid, sys.executable, "-c", STUBBORN) as watched:
        assert watched.stdout is not None and watched.stdout.readline() == "up\n"
        guard.write_owner(tmp_path / "owner", second.pid)
        first.kill()
        first.wait()
        with pytest.raises(subprocess.TimeoutExpired):
            watched.wait(timeout=1.0)
        second.kill()
        assert watched.wait(timeout=120) == 128 + signal.SIGKILL
    second.wait()


def test_guard_ends_when_nobody_owns_it_any_more(tmp_path: Path) -> None:
    with start_guard(
        tmp_path / "owner", os.getpid(), sys.executable, "-c", "import time; time.sleep(600)"
    ) as watched:
        (tmp_path / "owner").unlink()
        assert watched.wait(timeout=120) == 128 + signal.SIGTERM
