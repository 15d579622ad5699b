"""Runs a deployment on services of its own and reads figures from the report it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from components.errors import ServiceError
from components.reporting.report import LifecycleReport
from components.services.endpoints import REPO_DIR
from components.services.ports import PORT_FIELDS
from tests.benchmarks.run import Figure

TIMEOUT_S = 3 * 3600


@contextmanager
def own_services() -> Iterator[dict[str, str]]:
    """Services on free ports with an empty state folder; yields the environment that points at
    them.

    Raises:
        ServiceError: they do not come up.
    """
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        settings = {**dict.fromkeys(PORT_FIELDS, 0), "state_dir": f"{folder}/state"}
        path = Path(folder) / "services.yaml"
        path.write_text(yaml.safe_dump(settings))
        environment = {**os.environ, "DSPARK_SERVICES": str(path)}
        for name in ("DSPARK_STATE_DIR", "PREFECT_API_URL"):
            environment.pop(name, None)
        up = _module("components.services.up", environment=environment)
        if up.returncode != 0:
            raise ServiceError(
                "services did not come up", got=up.stderr.strip() or up.stdout.strip()
            )
        try:
            yield environment
        finally:
            _module("components.services.down", environment=environment)


def run_deployment(
    name: str, parameters: Mapping[str, str | None], *, environment: Mapping[str, str]
) -> tuple[LifecycleReport, float]:
    """Run a deployment to its end; its log goes to stderr. Returns its report and the wall time, s.

    Raises:
        ServiceError: the run did not complete.
    """
    started = time.perf_counter()
    arguments = (name, "--parameters", json.dumps(dict(parameters)), "--timeout-s", str(TIMEOUT_S))
    ended = _module("components.services.follow", *arguments, environment=environment, show=True)
    duration_s = time.perf_counter() - started
    if ended.returncode != 0:
        raise ServiceError(f"{name} did not complete", got=f"exit code {ended.returncode}")
    settings = yaml.safe_load(Path(environment["DSPARK_SERVICES"]).read_text())
    reports = Path(settings["state_dir"]).glob("runs/*/report/report.json")
    return LifecycleReport.read(max(reports, key=lambda path: path.stat().st_mtime)), duration_s


def at_most(name: str, value: float, goal: float, unit: str) -> Figure:
    """A figure that reaches its goal at or below it."""
    return Figure(name=name, value=value, unit=unit, goal=f"<={goal:g}", ok=value <= goal)


def at_least(name: str, value: float, goal: float, unit: str) -> Figure:
    """A figure that reaches its goal at or above it."""
    return Figure(name=name, value=value, unit=unit, goal=f">={goal:g}", ok=value >= goal)


def house_figures(report: LifecycleReport) -> list[Figure]:
    """What holds for every run: orchestration, memory, nothing on disk, nothing left in the
    store.
    """
    memory_gib = (report.peak_memory_mib or float("inf")) / 1024
    figures = [
        at_most("orchestration_share", report.orchestration_share, 0.05, "of_wall_time"),
        at_most("peak_memory", memory_gib, 12, "GiB"),
    ]
    if report.stream is not None:
        figures += [
            at_most("hidden_state_bytes_on_disk", report.stream.bytes_on_disk, 0, "B"),
            at_most("keys_left_in_store", report.stream.keys_left, 0, "keys"),
        ]
    return figures


def _module(
    module: str, *arguments: str, environment: Mapping[str, str], show: bool = False
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=REPO_DIR,
        env=dict(environment),
        stdout=sys.stderr if show else subprocess.PIPE,
        stderr=sys.stderr if show else subprocess.PIPE,
        text=True,
        check=False,
    )
