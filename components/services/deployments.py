"""Serves the deployments of prefect.yaml: registers them with the Prefect server, then becomes a
process worker.

Prefect is used through its command line only, in processes of their own: components never import
it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

from components.errors import ServiceError, run_main
from components.services.endpoints import REPO_DIR, load_settings
from components.services.prepare import WORK_POOL

PREFECT_FILE_VARIABLE = "DSPARK_PREFECT_FILE"


def prefect_file() -> Path:
    """The file of deployments: the one that DSPARK_PREFECT_FILE names, else the repository's
    prefect.yaml.
    """
    return REPO_DIR / os.environ.get(PREFECT_FILE_VARIABLE, "prefect.yaml")


def wait_for_server(api_url: str, *, timeout_s: float) -> None:
    """Wait until the Prefect server answers.

    Raises:
        ServiceError: it did not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{api_url}/health", timeout=3).is_success:
                return
        except httpx.HTTPError:  # not listening yet; the deadline bounds the wait
            pass
        time.sleep(0.5)
    raise ServiceError(
        "the Prefect server does not answer", got=f"nothing at {api_url} for {timeout_s:.0f} s"
    )


def run_prefect(*arguments: str) -> None:
    """Run one Prefect command; its output is this process's.

    Raises:
        ServiceError: it exited with another status than 0.
    """
    code = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *arguments], cwd=REPO_DIR
    ).returncode
    if code != 0:
        raise ServiceError(
            f"prefect {' '.join(arguments)} failed", got=f"status {code}", expected="status 0"
        )


def main() -> None:
    """Register the work pool and all deployments, then replace this process by the worker."""
    wait_for_server(os.environ["PREFECT_API_URL"], timeout_s=load_settings().startup_timeout_s)
    run_prefect("work-pool", "create", WORK_POOL, "--type", "process", "--overwrite")
    run_prefect("deploy", "--all", "--prefect-file", str(prefect_file()))
    worker = [
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--pool",
        WORK_POOL,
        "--type",
        "process",
    ]

    os.chdir(REPO_DIR)
    os.execv(sys.executable, [*worker, "--name", "local"])


if __name__ == "__main__":
    run_main(main)
