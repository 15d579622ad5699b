"""What must be there before a service starts: folders, HAProxy's configuration, the environment,
the state file.

`python -m components.services.prepare` does this and nothing else. It is for places where something
other than `make up` supervises the services, such as the containers of docker-compose.yml.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import sys
import uuid
from pathlib import Path

from components.contracts import write_atomic
from components.errors import ServiceError, run_main
from components.services.endpoints import (
    REPO_DIR,
    STATE_DIR_VARIABLE,
    STATE_FILE,
    ServicesState,
    build_endpoints,
    load_settings,
    resolve_state_dir,
)
from components.services.haproxy import MAX_SOCKET_PATH_LENGTH, render_haproxy_config
from components.services.ports import PORT_FIELDS
from components.settings import ServicesSettings
from components.system.processes import RUN_VARIABLE, ProcessIdentity

PROCFILE = REPO_DIR / "Procfile"
WORK_POOL = "dspark"
EXECUTABLES = {
    "prefect": "Run make setup.",
    "mlflow": "Run make setup.",
    "mooncake_master": "Run make setup (the package mooncake-transfer-engine ships it).",
    "haproxy": "Install the Debian package haproxy.",
}


def search_path() -> str:
    """PATH for services: this interpreter's scripts first, and the sbin folders where Debian keeps
    haproxy.
    """
    scripts = str(Path(sys.executable).parent)
    return os.pathsep.join(
        [scripts, os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"]
    )


def check_executables() -> None:
    """Check that every program of the Procfile can be found.

    Raises:
        ServiceError: one is missing; the message says what to install.
    """
    for name, fix in EXECUTABLES.items():
        if shutil.which(name, path=search_path()) is None:
            raise ServiceError(f"{name} is not installed", expected=f"{name} on PATH", fix=fix)


def prepare_folders(settings: ServicesSettings, *, state_dir: Path) -> None:
    """Create the folders of `state_dir` and write HAProxy's configuration.

    Raises:
        ServiceError: the path of the runtime socket is longer than the kernel takes.
    """
    socket_path = state_dir / "run" / "haproxy.sock"
    if len(os.fsencode(socket_path)) > MAX_SOCKET_PATH_LENGTH:
        raise ServiceError(
            "the state folder's path is too long for a Unix socket",
            got=f"{socket_path} ({len(os.fsencode(socket_path))} bytes)",
            expected=f"at most {MAX_SOCKET_PATH_LENGTH} bytes",
            fix=f"Set {STATE_DIR_VARIABLE} to a shorter path.",
        )

    for name in ("run", "logs", "prefect", "mlflow/artifacts"):
        (state_dir / name).mkdir(parents=True, exist_ok=True)
    write_atomic(
        state_dir / "run" / "haproxy.cfg", render_haproxy_config(settings, socket_path=socket_path)
    )


def service_environment(
    settings: ServicesSettings, *, state_dir: Path, run_id: str
) -> dict[str, str]:
    """Environment of the supervisor and so of every service and flow run: DSPARK_* for the
    Procfile, the rest below.
    """
    endpoints = build_endpoints(settings, state_dir=state_dir)
    ports = {f"DSPARK_{name.upper()}": str(getattr(settings, name)) for name in PORT_FIELDS}
    return {
        **os.environ,
        **ports,
        "DSPARK_HOST": settings.host,
        "DSPARK_REPO_DIR": str(REPO_DIR),
        STATE_DIR_VARIABLE: str(state_dir),
        RUN_VARIABLE: run_id,
        "PATH": search_path(),
        "PYTHONUNBUFFERED": "1",
        "DO_NOT_TRACK": "1",
        **_prefect_environment(endpoints.prefect_api_url, state_dir=state_dir),
        **_mlflow_environment(endpoints.mlflow_url, state_dir=state_dir),
    }


def _prefect_environment(api_url: str, *, state_dir: Path) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(state_dir / "prefect"),
        "PREFECT_API_URL": api_url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # The worker asks for work every 10 s by default: half of that, on average, is lost before
        # each run.
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        # On SQLite the server answers 503 when two writers meet; its clients ask again, by default
        # only five times.
        "PREFECT_CLIENT_MAX_RETRIES": "10",
        # What components log (they know nothing of Prefect) appears in the run's log as well.
        "PREFECT_LOGGING_EXTRA_LOGGERS": "components",
        "PREFECT_LOGGING_COLORS": "false",
    }


def _mlflow_environment(url: str, *, state_dir: Path) -> dict[str, str]:
    return {
        "MLFLOW_TRACKING_URI": url,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # The job runner serves hosted judges and prompt optimisation; unused here, it costs three
        # processes.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        # A webhook receiver on loopback is refused without these, and reading one back fails
        # without the key.
        "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https",
        "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
        "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": _webhook_key(
            state_dir / "run" / "mlflow_webhook.key"
        ),
    }


def _webhook_key(path: Path) -> str:
    """A Fernet key (32 random bytes, base64), made once and kept beside the database it encrypts
    for.
    """
    if not path.is_file():
        write_atomic(path, base64.urlsafe_b64encode(secrets.token_bytes(32)))
        path.chmod(0o600)
    return path.read_text().strip()


def write_state(
    settings: ServicesSettings, *, state_dir: Path, run_id: str, supervisor: ProcessIdentity | None
) -> ServicesState:
    """Write `<state_dir>/services.json`, which says that services are (about to be) up, and
    where.
    """
    state = ServicesState(
        settings=settings,
        endpoints=build_endpoints(settings, state_dir=state_dir),
        run_id=run_id,
        supervisor=supervisor,
    )
    state.write(state_dir / STATE_FILE)
    return state


def main() -> None:
    """Prepare for services that something else starts on the configured ports."""
    settings = load_settings()
    unset = [name for name in PORT_FIELDS if getattr(settings, name) == 0]
    if unset:
        raise ServiceError(
            "only make up can choose free ports", got=f"{unset[0]}: 0", expected="a fixed port"
        )
    state_dir = resolve_state_dir()
    prepare_folders(settings, state_dir=state_dir)
    write_state(settings, state_dir=state_dir, run_id=uuid.uuid4().hex, supervisor=None)
    print(f"prepared {state_dir}")


if __name__ == "__main__":
    run_main(main)
