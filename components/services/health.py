"""Whether each service is usable: one question to each, asked the way its clients ask."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import yaml

from components.services.endpoints import Endpoints
from components.services.prepare import WORK_POOL

TIMEOUT_S = 3.0

Check = Callable[[], str | None]
"""Returns None when the service is usable, else what is missing, in a few words."""


def build_checks(endpoints: Endpoints, *, prefect_file: Path) -> dict[str, Check]:
    """One check per service of the Procfile, in its order."""
    return {
        "prefect": partial(_http_ok, f"{endpoints.prefect_api_url}/health"),
        "mlflow": partial(_http_ok, f"{endpoints.mlflow_url}/health"),
        "store": partial(_store, endpoints),
        "haproxy": partial(_haproxy, endpoints),
        "deployments": partial(_deployments, endpoints, prefect_file),
    }


def failing_checks(checks: dict[str, Check]) -> dict[str, str]:
    """The checks that fail now, with their reasons."""
    results = {name: check() for name, check in checks.items()}
    return {name: reason for name, reason in results.items() if reason is not None}


def _http_ok(url: str) -> str | None:
    try:
        response = httpx.get(url, timeout=TIMEOUT_S)
    except httpx.HTTPError as error:
        return f"no answer ({type(error).__name__})"
    return None if response.status_code == httpx.codes.OK else f"status {response.status_code}"


def _store(endpoints: Endpoints) -> str | None:
    host, _, port = endpoints.store.master_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S).close()
    except OSError as error:
        return f"RPC port: {error.strerror or error}"
    return _http_ok(endpoints.store.metrics_url)


def _haproxy(endpoints: Endpoints) -> str | None:
    if reason := _http_ok(endpoints.haproxy_stats_url.removesuffix("/stats") + "/health"):
        return reason
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(endpoints.haproxy_socket)
            connection.sendall(b"show servers state\n")
            return None if connection.recv(64) else "runtime socket gives no answer"
    except OSError as error:
        return f"runtime socket: {error.strerror or error}"


def _deployments(endpoints: Endpoints, prefect_file: Path) -> str | None:
    api = endpoints.prefect_api_url
    expected = len(yaml.safe_load(prefect_file.read_text())["deployments"])
    try:
        found = httpx.post(f"{api}/deployments/count", json={}, timeout=TIMEOUT_S)
        if found.status_code != httpx.codes.OK or found.json() < expected:
            return f"{found.json() if found.is_success else 0} of {expected} deployed"
        workers = httpx.post(
            f"{api}/work_pools/{WORK_POOL}/workers/filter", json={}, timeout=TIMEOUT_S
        )
    except httpx.HTTPError as error:
        return f"no answer ({type(error).__name__})"

    online = workers.is_success and any(worker["status"] == "ONLINE" for worker in workers.json())
    return None if online else "no worker is online"
