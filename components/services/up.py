"""`make up`: resolve ports, start the supervisor, wait until every service is healthy, say where
everything is.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.errors import ServiceError, run_main
from components.services.deployments import prefect_file
from components.services.endpoints import (
    REPO_DIR,
    STATE_FILE,
    Endpoints,
    ServicesState,
    load_settings,
    read_state,
    resolve_state_dir,
)
from components.services.health import build_checks, failing_checks
from components.services.ports import resolve_ports
from components.services.prepare import (
    check_executables,
    prepare_folders,
    service_environment,
    write_state,
)
from components.services.supervisor import FAILURE_FILE
from components.settings import ServicesSettings
from components.system.processes import ProcessIdentity, stop_run

POLL_S = 0.5
PROGRESS_EVERY_S = 5.0
NUM_LOG_LINES = 15


def start_services(settings: ServicesSettings, *, state_dir: Path) -> ServicesState:
    """Start all services and return once all are healthy; on any failure everything started is
    ended again.

    Raises:
        PortInUseError: a configured port is taken; nothing was started.
        ServiceError: a program is missing, a service died, or one was not healthy within
            `startup_timeout_s`.
    """
    check_executables()
    settings = resolve_ports(settings)
    prepare_folders(settings, state_dir=state_dir)
    _rotate_logs(state_dir)
    run_id = uuid.uuid4().hex
    environment = service_environment(settings, state_dir=state_dir, run_id=run_id)
    process = _spawn_supervisor(environment, state_dir=state_dir)

    supervisor = ProcessIdentity.of(process.pid)
    try:
        state = write_state(settings, state_dir=state_dir, run_id=run_id, supervisor=supervisor)
        wait_healthy(state, supervisor=process)
    except BaseException:
        stop_run(run_id, supervisor=supervisor)
        process.wait()
        (state_dir / STATE_FILE).unlink(missing_ok=True)
        raise

    return state


def wait_healthy(
    state: ServicesState, *, supervisor: subprocess.Popen[bytes] | None = None
) -> None:
    """Wait until every check passes; a line every few seconds says what is still missing.

    Raises:
        ServiceError: the supervisor ended, or the time is over. The message ends in the culprit's
            last log lines.
    """
    checks = build_checks(state.endpoints, prefect_file=prefect_file())
    started_s = last_line_s = time.monotonic()
    while failing := failing_checks(checks):
        now = time.monotonic()
        if supervisor is not None and supervisor.poll() is not None:
            raise _died(state.endpoints)
        if now - started_s > state.settings.startup_timeout_s:
            raise _not_healthy(state, failing)
        if now - last_line_s >= PROGRESS_EVERY_S:
            waiting = ", ".join(f"{name} ({reason})" for name, reason in failing.items())
            print(f"  {now - started_s:3.0f} s  waiting for {waiting}", flush=True)
            last_line_s = now
        time.sleep(POLL_S)


def describe(endpoints: Endpoints) -> str:
    """Table of addresses, and the line a shell needs to use the Prefect command line."""
    rows = {
        "Prefect UI": endpoints.prefect_api_url.removesuffix("/api"),
        "MLflow UI": endpoints.mlflow_url,
        "chat completions": f"{endpoints.haproxy_url}/v1/chat/completions",
        "splitter statistics": endpoints.haproxy_stats_url,
        "store": f"{endpoints.store.master_address} (metrics {endpoints.store.metrics_url})",
        "logs": endpoints.logs_dir,
    }
    lines = [f"  {name:<20} {address}" for name, address in rows.items()]
    exported = f"export PREFECT_API_URL={endpoints.prefect_api_url}"
    return "\n".join([*lines, f"  for the command line {exported}"])


def _spawn_supervisor(environment: dict[str, str], *, state_dir: Path) -> subprocess.Popen[bytes]:
    with (state_dir / "logs" / "supervisor.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "components.services.supervisor"],
            cwd=REPO_DIR,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _rotate_logs(state_dir: Path) -> None:
    """Keep the logs of the run before as *.log.1, so that a log file holds one run."""
    (state_dir / "run" / FAILURE_FILE).unlink(missing_ok=True)
    for log in (state_dir / "logs").glob("*.log"):
        log.replace(log.with_name(f"{log.name}.1"))


def _died(endpoints: Endpoints) -> ServiceError:
    path = Path(endpoints.state_dir) / "run" / FAILURE_FILE
    name, _, code = (
        path.read_text().partition(" ") if path.is_file() else ("supervisor", "", "unknown")
    )
    return ServiceError(
        f"{name} ended while starting",
        got=f"status {code.strip()}",
        fix=_log_excerpt(endpoints, service=name),
    )


def _not_healthy(state: ServicesState, failing: dict[str, str]) -> ServiceError:
    name, reason = next(iter(failing.items()))
    return ServiceError(
        f"{name} is not healthy",
        got=f"{reason} after {state.settings.startup_timeout_s:.0f} s",
        fix=_log_excerpt(state.endpoints, service=name),
    )


def _log_excerpt(endpoints: Endpoints, *, service: str) -> str:
    path = Path(endpoints.logs_dir) / f"{service}.log"
    lines = path.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:] if path.is_file() else []
    return "\n".join([f"Last lines of {path}:", *(f"  | {line}" for line in lines or ["(empty)"])])


@contextmanager
def exclusive(state_dir: Path) -> Iterator[None]:
    """Hold the state folder's lock, so that two `up` or `down` at once take turns."""
    (state_dir / "run").mkdir(parents=True, exist_ok=True)
    with (state_dir / "run" / "up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def bring_up() -> Endpoints:
    """Start the services, or say that they are up; returns where they answer."""
    state_dir = resolve_state_dir()
    with exclusive(state_dir):
        state = read_state(state_dir)
        if state is not None:
            wait_healthy(state)
            print("services are already up")
        else:
            started_s = time.monotonic()
            print(f"starting services (logs in {state_dir / 'logs'})", flush=True)
            state = start_services(load_settings(), state_dir=state_dir)
            print(f"services are up after {time.monotonic() - started_s:.0f} s")

    print(describe(state.endpoints))
    return state.endpoints


def main() -> None:
    """See `bring_up`."""
    bring_up()


if __name__ == "__main__":
    os.umask(0o022)
    run_main(main)
