"""The state file: who may read it, and what counts as up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from components.errors import ServiceError
from components.services.endpoints import (
    REPO_DIR,
    STATE_FILE,
    load_endpoints,
    resolve_state_dir,
)
from components.services.prepare import service_environment, write_state
from components.settings import ServicesSettings
from components.system.processes import ProcessIdentity


def _write(folder: Path, supervisor: ProcessIdentity | None) -> None:
    write_state(ServicesSettings(), state_dir=folder, run_id="r", supervisor=supervisor)


def test_endpoints_follow_from_settings(tmp_path: Path) -> None:
    _write(tmp_path, ProcessIdentity.of(os.getpid()))
    endpoints = load_endpoints(tmp_path)
    assert endpoints.prefect_api_url == "http://127.0.0.1:4200/api"
    assert endpoints.mlflow_url == "http://127.0.0.1:5000"
    assert endpoints.store.master_address == "127.0.0.1:50051"
    assert endpoints.haproxy_url == "http://127.0.0.1:8080"
    assert Path(endpoints.haproxy_socket) == tmp_path / "run" / "haproxy.sock"


def test_missing_state_says_to_run_make_up(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"services are not up.*Run make up"):
        load_endpoints(tmp_path)


def test_a_recycled_pid_does_not_count_as_up(tmp_path: Path) -> None:
    _write(tmp_path, ProcessIdentity(pid=os.getpid(), start_ticks=1))
    with pytest.raises(ServiceError, match="not up"):
        load_endpoints(tmp_path)


def test_services_supervised_elsewhere_count_as_up(tmp_path: Path) -> None:
    _write(tmp_path, None)
    assert load_endpoints(tmp_path).state_dir == str(tmp_path)


def test_a_broken_state_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text("{}")
    with pytest.raises(ServiceError, match="cannot be read"):
        load_endpoints(tmp_path)


def test_state_dir_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "services.yaml"
    settings.write_text("state_dir: elsewhere\n")
    monkeypatch.delenv("DSPARK_STATE_DIR", raising=False)
    monkeypatch.setenv("DSPARK_SERVICES", str(settings))
    assert resolve_state_dir() == REPO_DIR / "elsewhere"
    monkeypatch.setenv("DSPARK_STATE_DIR", str(tmp_path / "env"))
    assert resolve_state_dir() == tmp_path / "env"
    assert resolve_state_dir(tmp_path / "argument") == tmp_path / "argument"


def test_the_environment_turns_reporting_home_off_and_keeps_state_inside(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    environment = service_environment(ServicesSettings(), state_dir=tmp_path, run_id="r")
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert environment["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert Path(environment["PREFECT_HOME"]).is_relative_to(tmp_path)
    again = service_environment(ServicesSettings(), state_dir=tmp_path, run_id="r")
    key = "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY"
    assert environment[key] == again[key] and len(environment[key]) == 44
    assert (tmp_path / "run" / "mlflow_webhook.key").stat().st_mode & 0o077 == 0
