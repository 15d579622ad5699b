"""Real services for tests, on free ports, in a state folder of their own, with a small flow beside
the deployments.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from components.services.endpoints import REPO_DIR, STATE_FILE, ServicesState
from components.services.ports import PORT_FIELDS
from components.system.processes import run_processes

START_TIMEOUT_S = 600
"""How long services may take to come up: a safety net, as slow machines need minutes."""

FLOW = """
import logging, os, subprocess, time
import tasks
from prefect import flow, get_run_logger

@flow(name="inner-flow")
def inner():
    logging.getLogger("components.probe").info("said by a component")

@flow(name="probe-flow")
def probe_flow(seconds: int = 0, fail: bool = False):
    get_run_logger().info("working in %s", os.getcwd())
    inner()
    child = subprocess.Popen(["sleep", "600"]) if seconds else None
    time.sleep(seconds)
    if fail:
        raise ValueError("asked to fail")
"""

DEPLOYMENT = {
    "name": "demo",
    "entrypoint": "probe_flows.probe_flow",
    "parameters": {"seconds": 0},
    "work_pool": {"name": "dspark"},
}


class Services:
    """The service commands of the Makefile against one state folder, each in a process of its own.

    Args:
        folder: gets the settings file and, under `state/`, everything the services write. Keep its
            path short: a Unix socket lies in it.
    """

    def __init__(self, folder: Path) -> None:
        self.state_dir = folder / "state"
        self.settings = {
            **dict.fromkeys(PORT_FIELDS, 0),
            "state_dir": str(self.state_dir),
            "startup_timeout_s": START_TIMEOUT_S,
        }
        self._settings_path = folder / "services.yaml"
        self.environment = {**os.environ, "DSPARK_SERVICES": str(self._settings_path)}
        for name in ("DSPARK_STATE_DIR", "PREFECT_API_URL"):
            self.environment.pop(name, None)

    def write_settings(self) -> None:
        """Write `settings` where DSPARK_SERVICES points."""
        self._settings_path.write_text(yaml.safe_dump(self.settings))

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`python -m components.services.<command>`, settings written first."""
        self.write_settings()
        return self.python("-m", f"components.services.{command}", *arguments)

    def python(
        self,
        *arguments: str,
        timeout_s: float = START_TIMEOUT_S + 60,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """This interpreter with the environment that points at these services, and `variables`."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=REPO_DIR,
            env=self.environment | dict(variables or {}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    @property
    def state(self) -> ServicesState:
        """Of the running services."""
        return ServicesState.read(self.state_dir / STATE_FILE)


@contextmanager
def running_services(folder: Path) -> Iterator[Services]:
    """Services that are up, serving the repository's deployments and `probe-flow/demo`; nothing is
    left of them after.

    A test may end them itself.
    """
    (folder / "probe_flows.py").write_text(FLOW)
    prefect_file = yaml.safe_load((REPO_DIR / "prefect.yaml").read_text())
    prefect_file["deployments"].append(DEPLOYMENT)
    (folder / "prefect.yaml").write_text(yaml.safe_dump(prefect_file))
    services = Services(folder)
    services.environment |= {
        "DSPARK_PREFECT_FILE": str(folder / "prefect.yaml"),
        "PYTHONPATH": str(folder),
    }
    up = services.run("up")
    assert up.returncode == 0, up.stdout + up.stderr
    run_id = services.state.run_id
    try:
        yield services
    finally:
        down = services.run("down")
        assert down.returncode == 0, down.stdout + down.stderr
        assert run_processes(run_id) == []
