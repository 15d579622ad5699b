"""Real services for the stream's tests: a Mooncake master, and a stand-in engine that can be told
to misbehave.

The stand-in answers completions over HTTP and writes real objects into the real store, so that
faults a healthy vLLM never shows (a flipped bit, NaN, silence) meet the real reader. What vLLM
itself does, the tests of the real engine show.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import torch

from components.contracts import StoreEndpoint, TargetFingerprint
from components.hidden_states import wire
from components.hidden_states.sample import SampleRequest

FINGERPRINT = TargetFingerprint(
    weights="a" * 64, quantization="b" * 64, tokenizer="c" * 64, serving="d" * 64
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Master:
    """A `mooncake_master` process."""

    def __init__(self, log_path: Path) -> None:
        rpc, metrics = free_port(), free_port()
        self.endpoint = StoreEndpoint(
            master_address=f"127.0.0.1:{rpc}", metrics_url=f"http://127.0.0.1:{metrics}/metrics"
        )
        program = str(Path(sys.executable).with_name("mooncake_master"))
        self._command = [program, f"-rpc_port={rpc}", f"-metrics_port={metrics}"]
        self._log_path = log_path
        self.start()

    def start(self) -> None:
        with self._log_path.open("a") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        wait_until(lambda: answers(self.endpoint.metrics_url), timeout_s=120)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(timeout=60)


@contextmanager
def running_master(folder: Path) -> Iterator[Master]:
    master = Master(folder / "master.log")
    try:
        yield master
    finally:
        master.kill()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).is_success
    except httpx.HTTPError:
        return False


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"nothing within {timeout_s} s"
        time.sleep(0.05)


def make_requests(
    num_samples: int, *, seed: int = 0, low: int = 20, high: int = 200
) -> list[SampleRequest]:
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(num_samples):
        num_tokens = int(rng.integers(low, high))
        ids = rng.integers(3, 500, num_tokens).astype(np.int32)
        requests.append(
            SampleRequest(index, f"sample-{index}", ids, np.arange(num_tokens) >= num_tokens // 2)
        )
    return requests


def simulated_states(token_ids: np.ndarray, *, num_layers: int, hidden_size: int) -> torch.Tensor:
    """States that depend on the tokens, so that a mix-up of samples shows."""
    generator = torch.Generator().manual_seed(
        int(token_ids.astype(np.int64).sum()) * 4093 + len(token_ids)
    )
    return torch.randn(len(token_ids), num_layers, hidden_size, generator=generator).to(
        torch.bfloat16
    )


class SimulatedEngine:
    """HTTP server and store producer in this process. `misbehave(index_of_call, name)` names a
    fault or None.

    Faults: 'error' (marker), 'flip' (one bit), 'nan', 'tokens', 'silent' (answers, writes nothing),
    '500', '400', 'slow' (0.3 s), 'hang' (never answers), 'drop' (hangs up), 'foreign' (another
    fingerprint), 'layers'.
    """

    def __init__(
        self,
        endpoint: StoreEndpoint,
        *,
        run_id: str,
        layer_ids: tuple[int, ...] = (1, 2, 4),
        hidden_size: int = 64,
        misbehave: Callable[[int, str], str | None] = lambda number, name: None,
        segment_mib: int = 64,
        local_buffer_mib: int = 16,
    ) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self.run_id = run_id
        self.layer_ids = layer_ids
        self.hidden_size = hidden_size
        self.misbehave = misbehave
        self.num_calls = 0
        self.names: list[str] = []
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._store = MooncakeDistributedStore()
        assert (
            self._store.setup(
                "127.0.0.1",
                "P2PHANDSHAKE",
                segment_mib << 20,
                local_buffer_mib << 20,
                "tcp",
                "",
                endpoint.master_address,
            )
            == 0
        )
        self._pinned = ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop_listening(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def close(self) -> None:
        self._ending.set()
        self.stop_listening()
        threading.Thread(target=self._store.close, daemon=True).start()

    def answer(self, body: dict[str, object]) -> tuple[int, dict[str, object]]:
        name = body["kv_transfer_params"]["hidden_states_key"]  # type: ignore[index]
        with self._lock:
            number = self.num_calls
            self.num_calls = self.num_calls + 1
            self.names.append(name)
        fault = self.misbehave(number, name)
        if fault == "hang":
            self._ending.wait(60)
        if fault == "slow":
            time.sleep(0.3)
        if fault == "drop":
            raise OSError("told to hang up")
        if fault in {"400", "500"}:
            return int(fault), {"error": f"told to answer {fault}"}
        key = wire.store_key(self.run_id, name)
        self._write(key, name, np.array(body["prompt"], dtype=np.int32), fault)
        return 200, {"choices": [{"token_ids": [7]}], "kv_transfer_params": {"handle": key}}

    def _write(self, key: str, name: str, token_ids: np.ndarray, fault: str | None) -> None:
        if fault == "silent":
            return
        if fault == "error":
            marker = json.dumps({"error": "budget: told to refuse"}).encode()
            assert self._store.put(wire.error_key(key), marker, self._pinned) == 0
            return
        status = self._store.put(key, self._encode(name, token_ids, fault), self._pinned)
        assert status == 0 or self._ending.is_set(), status

    def _encode(self, name: str, token_ids: np.ndarray, fault: str | None) -> bytes:
        states = simulated_states(
            token_ids, num_layers=len(self.layer_ids), hidden_size=self.hidden_size
        )
        if fault == "nan":
            states[len(token_ids) // 2, 1, 3] = float("nan")
        place = wire.layout(
            num_tokens=len(token_ids), num_layers=len(self.layer_ids), hidden_size=self.hidden_size
        )
        data = bytearray(place.num_bytes)
        data[place.states_offset : place.states_offset + place.states_bytes] = (
            states.view(torch.int16).numpy().tobytes()
        )
        written = token_ids + 1 if fault == "tokens" else token_ids
        data[place.tokens_offset : place.tokens_offset + place.tokens_bytes] = written.tobytes()
        header = wire.SampleHeader(
            run_id=self.run_id,
            sample=name,
            weights=FINGERPRINT.weights,
            fingerprint="e" * 64 if fault == "foreign" else FINGERPRINT.digest,
            layer_ids=tuple(layer + 1 for layer in self.layer_ids)
            if fault == "layers"
            else self.layer_ids,
            dtype="bfloat16",
            shape=tuple(states.shape),
            checksum=wire.payload_checksum(memoryview(data)),
        )
        data[: wire.HEADER_BYTES] = wire.pack_header(header)
        if fault == "flip":
            data[place.states_offset + place.states_bytes // 2] ^= 16
        return bytes(data)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "t"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    self._send(*engine.answer(body))
                except OSError:
                    self.close_connection = True  # told to hang up, or the client did

            def _send(self, code: int, value: dict[str, object]) -> None:
                data = json.dumps(value).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        return Handler


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process started in its own session, with all its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
