"""Procfile, prefect.yaml, docker-compose.yml and the settings say the same."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from honcho.environ import parse_procfile

from components.errors import ServiceError
from components.services import prepare
from components.services.endpoints import REPO_DIR, build_endpoints
from components.services.health import build_checks
from components.services.ports import PORT_FIELDS
from components.services.prepare import PROCFILE, WORK_POOL, prepare_folders, service_environment
from components.settings import ServicesSettings, load_services

COMMANDS = parse_procfile(PROCFILE.read_text()).processes


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((REPO_DIR / "docker-compose.yml").read_text())
    return loaded


def test_every_variable_of_the_procfile_is_set(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    environment = service_environment(ServicesSettings(), state_dir=tmp_path, run_id="r")
    used = set(re.findall(r"\$([A-Z_]+)", PROCFILE.read_text()))
    assert used <= environment.keys()
    assert {
        f"DSPARK_{name.upper()}" for name in PORT_FIELDS if not name.startswith("haproxy")
    } <= used


def test_every_service_has_a_health_check(tmp_path: Path) -> None:
    endpoints = build_endpoints(ServicesSettings(), state_dir=tmp_path)
    assert list(build_checks(endpoints, prefect_file=REPO_DIR / "prefect.yaml")) == list(COMMANDS)


def test_deployments_name_flows_of_their_module_in_one_pool() -> None:
    deployments = yaml.safe_load((REPO_DIR / "prefect.yaml").read_text())["deployments"]
    for deployment in deployments:
        module, _, function = deployment["entrypoint"].rpartition(".")
        assert importlib.util.find_spec(module) is not None
        assert module.split(".") == ["flows", function]
        assert deployment["work_pool"]["name"] == WORK_POOL
    schedules = [
        schedule for deployment in deployments for schedule in deployment.get("schedules", [])
    ]
    assert schedules and not any(schedule["active"] for schedule in schedules)


def test_compose_file_is_valid_by_the_compose_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    result = subprocess.run(
        [*command, str(REPO_DIR / "docker-compose.yml")], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_compose_runs_the_services_of_the_procfile(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services.keys() == {"prepare", *COMMANDS}
    for name in COMMANDS:
        assert services[name]["command"] == ["python", "-m", "components.services.run_one", name]


def test_compose_health_checks_ask_the_configured_ports(compose: dict[str, Any]) -> None:
    endpoints = build_endpoints(
        load_services(REPO_DIR / "configs" / "services.yaml"), state_dir=Path("/state")
    )
    expected = {
        "prefect": f"{endpoints.prefect_api_url}/health",
        "mlflow": f"{endpoints.mlflow_url}/health",
        "store": endpoints.store.metrics_url,
        "haproxy": endpoints.haproxy_stats_url.removesuffix("/stats") + "/health",
    }
    asked = {name: compose["services"][name]["healthcheck"]["test"][-1] for name in expected}
    assert asked == expected


def test_a_missing_program_is_one_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepare, "EXECUTABLES", {"no-such-program": "Install it."})
    with pytest.raises(ServiceError, match=r"no-such-program is not installed.*Install it"):
        prepare.check_executables()


def test_a_state_folder_too_deep_for_a_socket_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    deep = tmp_path / ("d" * 100)
    with pytest.raises(ServiceError, match="too long for a Unix socket"):
        prepare_folders(ServicesSettings(), state_dir=deep)
    assert not deep.exists()
