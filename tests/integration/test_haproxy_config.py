"""The rendered configuration in a real HAProxy: weights are exact, and a refused request goes to
the other arm.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from components.services.haproxy import (
    ARM_HEADER,
    BACKEND,
    BASELINE,
    CANDIDATE,
    render_haproxy_config,
)
from components.services.prepare import search_path
from components.settings import ServicesSettings
from components.system.ports import free_port

pytestmark = pytest.mark.integration


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_arguments: object) -> None:
        return


@dataclass
class Splitter:
    url: str
    socket_path: Path

    def command(self, text: str) -> str:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self.socket_path))
            client.sendall(f"{text}\n".encode())
            return client.makefile().read().strip()

    def serve(self, arm: str, port: int) -> None:
        self.command(f"set server {BACKEND}/{arm} addr 127.0.0.1 port {port}")
        self.command(f"set server {BACKEND}/{arm} state ready")

    def weights(self, *, candidate: int, baseline: int) -> None:
        self.command(f"set weight {BACKEND}/{CANDIDATE} {candidate}")
        self.command(f"set weight {BACKEND}/{BASELINE} {baseline}")

    def arms(self, num_requests: int) -> Counter[str]:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            return Counter(
                client.get("/v1/models").headers[ARM_HEADER] for _ in range(num_requests)
            )


@pytest.fixture
def splitter(tmp_path: Path) -> Iterator[Splitter]:
    first = free_port()
    services = ServicesSettings(
        haproxy_port=first, haproxy_stats_port=free_port(taken=frozenset({first}))
    )
    path = tmp_path / "haproxy.cfg"
    path.write_text(render_haproxy_config(services, socket_path=tmp_path / "h.sock"))
    program = shutil.which("haproxy", path=search_path())
    assert program is not None, "haproxy is part of the set-up"
    checked = subprocess.run([program, "-c", "-f", str(path)], capture_output=True, text=True)
    assert checked.returncode == 0 and "WARNING" not in checked.stderr, checked.stderr
    process = subprocess.Popen([program, "-W", "-db", "-f", str(path)], stdout=subprocess.DEVNULL)
    splitter = Splitter(f"http://127.0.0.1:{services.haproxy_port}", tmp_path / "h.sock")
    try:
        deadline = time.monotonic() + 60
        while not splitter.socket_path.exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        yield splitter
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture
def engines() -> Iterator[list[ThreadingHTTPServer]]:
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Healthy) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()


def test_no_engine_in_a_slot_is_a_503_at_once(splitter: Splitter) -> None:
    assert httpx.get(splitter.url, timeout=60).status_code == 503


@pytest.mark.parametrize("percent", [1, 5, 25, 50, 99, 100])
def test_weights_are_exact_over_a_hundred_requests(
    splitter: Splitter, engines: list[ThreadingHTTPServer], percent: int
) -> None:
    splitter.serve(CANDIDATE, engines[0].server_port)
    splitter.serve(BASELINE, engines[1].server_port)
    splitter.weights(candidate=percent, baseline=100 - percent)
    expected = {CANDIDATE: percent, BASELINE: 100 - percent}
    assert splitter.arms(200) == {arm: 2 * count for arm, count in expected.items() if count}


def test_an_arm_that_refuses_connections_loses_no_request(
    splitter: Splitter, engines: list[ThreadingHTTPServer]
) -> None:
    splitter.serve(CANDIDATE, engines[0].server_port)
    splitter.serve(BASELINE, engines[1].server_port)
    splitter.weights(candidate=50, baseline=50)
    assert splitter.arms(20) == {CANDIDATE: 10, BASELINE: 10}
    engines[0].shutdown()
    engines[0].server_close()
    assert splitter.arms(20) == {BASELINE: 20}
