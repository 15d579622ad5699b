"""`make up` and `make down` with the real services, on free ports."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from components.services.endpoints import REPO_DIR, STATE_FILE, Endpoints, load_endpoints
from components.services.ports import PORT_FIELDS
from components.system.processes import run_processes
from tests.support.running_services import Services, running_services

pytestmark = pytest.mark.integration

ANSWER_TIMEOUT_S = 60.0
"""How long a service on this machine may take to answer: a safety net."""


def test_up_serves_everything_and_says_where(services: Services) -> None:
    endpoints = load_endpoints(services.state_dir)
    for url in (
        f"{endpoints.prefect_api_url}/health",
        f"{endpoints.mlflow_url}/health",
        endpoints.store.metrics_url,
    ):
        assert httpx.get(url, timeout=ANSWER_TIMEOUT_S).status_code == 200
    assert (
        "master_key_count" in httpx.get(endpoints.store.metrics_url, timeout=ANSWER_TIMEOUT_S).text
    )
    assert (
        "candidate"
        in httpx.get(f"{endpoints.haproxy_stats_url};csv", timeout=ANSWER_TIMEOUT_S).text
    )
    again = services.run("up")
    assert again.returncode == 0 and "already up" in again.stdout
    assert (
        endpoints.mlflow_url in again.stdout
        and f"PREFECT_API_URL={endpoints.prefect_api_url}" in again.stdout
    )
    names = {path.name for path in Path(endpoints.logs_dir).glob("*.log")}
    assert {
        "prefect.log",
        "mlflow.log",
        "haproxy.log",
        "store.log",
        "deployments.log",
        "supervisor.log",
    } <= names


def test_prefect_command_line_lists_and_watches_deployments(services: Services) -> None:
    prefect = {"PREFECT_API_URL": services.state.endpoints.prefect_api_url}
    listing = services.python("-m", "prefect", "deployment", "ls", variables=prefect)
    expected = yaml.safe_load((REPO_DIR / "prefect.yaml").read_text())["deployments"]
    for deployment in expected:
        flow_name = deployment["entrypoint"].rpartition(".")[2].replace("_", "-")
        assert f"{flow_name}/{deployment['name']}" in listing.stdout, (
            listing.stdout + listing.stderr
        )
    watched = services.python(
        "-m", "prefect", "deployment", "run", "probe-flow/demo", "--watch", variables=prefect
    )
    assert watched.returncode == 0, watched.stdout + watched.stderr


def test_follow_shows_logs_of_flow_subflow_and_components(services: Services) -> None:
    result = services.run("follow", "probe-flow/demo")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"working in {REPO_DIR}" in result.stdout
    line = next(line for line in result.stdout.splitlines() if "said by a component" in line)
    assert "inner-flow" in line
    failed = services.run("follow", "probe-flow/demo", "--parameters", '{"fail": true}')
    assert failed.returncode == 1
    assert "FAILED" in failed.stdout.splitlines()[-1] and "asked to fail" in failed.stdout
    assert "Traceback" not in failed.stdout + failed.stderr


def test_interrupting_follow_cancels_the_run(services: Services) -> None:
    follow = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "components.services.follow",
            "probe-flow/demo",
            "--parameters",
            '{"seconds": 300}',
        ],
        cwd=REPO_DIR,
        env=services.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert follow.stdout is not None
    for line in follow.stdout:
        if "said by a component" in line:
            break
    follow.terminate()
    rest = follow.stdout.read()
    assert follow.wait(timeout=600) == 130
    assert "the run ended: CANCELLED" in rest


@pytest.mark.long
def test_a_service_that_dies_comes_back_and_the_others_stay(services: Services) -> None:
    endpoints = services.state.endpoints
    masters = [p for p in run_processes(services.state.run_id) if p.name() == "mooncake_master"]
    before = {p.pid for p in run_processes(services.state.run_id) if "haproxy" in p.name()}
    assert len(masters) == 1
    masters[0].kill()
    masters[0].wait(timeout=60)
    _wait_for(lambda: _answers(endpoints.store.metrics_url))
    assert {p.pid for p in run_processes(services.state.run_id) if "haproxy" in p.name()} == before
    assert (
        httpx.get(f"{endpoints.prefect_api_url}/health", timeout=ANSWER_TIMEOUT_S).status_code
        == 200
    )


@pytest.mark.long
def test_down_ends_every_process_flow_runs_included(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """On services of its own. `make test` ends those that all tests share, and looks for what is
    left, too.
    """
    with running_services(tmp_path_factory.mktemp("down")) as services:
        end_while_a_flow_runs(services)


def end_while_a_flow_runs(services: Services) -> None:
    state = services.state
    created = httpx.post(
        f"{state.endpoints.prefect_api_url}/deployments/{_deployment_id(state.endpoints)}/create_flow_run",
        json={"parameters": {"seconds": 300}, "state": {"type": "SCHEDULED"}},
        timeout=ANSWER_TIMEOUT_S,
    )
    assert created.status_code == 201
    _wait_for(lambda: any("sleep" in p.name() for p in run_processes(state.run_id)))
    down = services.run("down")
    assert down.returncode == 0 and "services are down" in down.stdout
    assert run_processes(state.run_id) == []
    assert not (services.state_dir / STATE_FILE).exists()
    assert "not up" in services.run("down").stdout
    for name in PORT_FIELDS:
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", getattr(state.settings, name))) != 0


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    services = Services(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        services.settings["haproxy_port"] = taken.getsockname()[1]
        result = services.run("up")
    assert result.returncode == 1
    assert "haproxy_port is taken" in result.stderr and f"pid {os.getpid()}" in result.stderr
    assert "Traceback" not in result.stderr
    assert (
        not list((tmp_path / "state").rglob("*.log"))
        and not (tmp_path / "state" / STATE_FILE).exists()
    )


@pytest.mark.long
def test_a_store_that_cannot_start_ends_the_rest_and_shows_its_log(tmp_path: Path) -> None:
    """A master without its shared libraries dies as this stand-in does; everything else must be
    ended again.
    """
    program = tmp_path / "bin" / "mooncake_master"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\necho 'error while loading shared libraries: libibverbs.so.1' >&2\nexit 127\n"
    )
    program.chmod(0o755)
    procfile = "import components.services.prepare as p, os; "
    procfile += (
        f"path = p.search_path; p.search_path = lambda: {str(program.parent)!r} + "
        "os.pathsep + path(); "
    )
    services = Services(tmp_path)
    services.write_settings()
    result = services.python(
        "-c", procfile + "import components.services.up as u; u.run_main(u.main)"
    )
    assert result.returncode == 1
    assert "store ended while starting; got status 127" in result.stderr
    assert "error while loading shared libraries: libibverbs.so.1" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "state" / STATE_FILE).exists()
    assert not [p for p in psutil.process_iter() if str(tmp_path) in _environment_text(p)]


def _environment_text(process: psutil.Process) -> str:
    try:
        return json.dumps(process.environ())
    except (psutil.Error, OSError):
        return ""


def _deployment_id(endpoints: Endpoints) -> str:
    url = f"{endpoints.prefect_api_url}/deployments/name/probe-flow/demo"
    return str(httpx.get(url, timeout=ANSWER_TIMEOUT_S).json()["id"])


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).is_success
    except httpx.HTTPError:
        return False


def _wait_for(condition: object, timeout_s: float = 300) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.25)
