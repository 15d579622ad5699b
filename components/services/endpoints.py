"""Where the services are: the file that `make up` writes, and the record that everything else
reads.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from components.contracts import Record, StoreEndpoint
from components.errors import ConfigError, ServiceError
from components.settings import CONFIGS_DIR, ServicesSettings, load_services
from components.system.processes import ProcessIdentity

REPO_DIR = CONFIGS_DIR.parent
STATE_FILE = "services.json"
STATE_DIR_VARIABLE = "DSPARK_STATE_DIR"
SETTINGS_VARIABLE = "DSPARK_SERVICES"


class Endpoints(Record):
    """Addresses of all running services, and the folders they share."""

    prefect_api_url: str = Field(description="of the Prefect server, ending in /api")
    mlflow_url: str
    store: StoreEndpoint
    haproxy_url: str = Field(description="where clients send /v1/chat/completions")
    haproxy_stats_url: str
    haproxy_socket: str = Field(description="path of HAProxy's runtime API socket")
    engine_port_base: int = Field(description="engines look for a free port from here up")
    state_dir: str
    logs_dir: str


class ServicesState(Record):
    """Content of `<state_dir>/services.json`."""

    settings: ServicesSettings = Field(description="as resolved: no port is 0")
    endpoints: Endpoints
    run_id: str = Field(
        description="value of DSPARK_SERVICES_RUN in the environment of every process of this run"
    )
    supervisor: ProcessIdentity | None = Field(
        default=None, description="None where something else (containers) supervises"
    )


def load_settings() -> ServicesSettings:
    """Service settings in force: the file that DSPARK_SERVICES names, else
    `configs/services.yaml`.
    """
    return load_services(os.environ.get(SETTINGS_VARIABLE))


def resolve_state_dir(state_dir: str | Path | None = None) -> Path:
    """Absolute state folder: the argument, else DSPARK_STATE_DIR, else the settings; relative to
    the repository.
    """
    chosen = state_dir or os.environ.get(STATE_DIR_VARIABLE) or load_settings().state_dir
    return (REPO_DIR / Path(chosen).expanduser()).resolve()


def build_endpoints(settings: ServicesSettings, *, state_dir: Path) -> Endpoints:
    """Endpoints that follow from resolved settings."""
    host = settings.host
    return Endpoints(
        prefect_api_url=f"http://{host}:{settings.prefect_port}/api",
        mlflow_url=f"http://{host}:{settings.mlflow_port}",
        store=StoreEndpoint(
            master_address=f"{host}:{settings.mooncake_rpc_port}",
            metrics_url=f"http://{host}:{settings.mooncake_metrics_port}/metrics",
            local_hostname=host,
        ),
        haproxy_url=f"http://{host}:{settings.haproxy_port}",
        haproxy_stats_url=f"http://{host}:{settings.haproxy_stats_port}/stats",
        haproxy_socket=str(state_dir / "run" / "haproxy.sock"),
        engine_port_base=settings.engine_port_base,
        state_dir=str(state_dir),
        logs_dir=str(state_dir / "logs"),
    )


def read_state(state_dir: Path) -> ServicesState | None:
    """State of services that are up, or None: no file, or its supervisor has ended.

    Raises:
        ConfigError: the file is there and is not a `ServicesState`.
    """
    path = state_dir / STATE_FILE
    if not path.is_file():
        return None
    state = ServicesState.read(path)
    if state.supervisor is not None and state.supervisor.find() is None:
        return None
    return state


def load_endpoints(state_dir: str | Path | None = None) -> Endpoints:
    """Endpoints of the running services.

    Raises:
        ServiceError: the services are not up, or their state file cannot be read.
    """
    folder = resolve_state_dir(state_dir)
    try:
        state = read_state(folder)
    except ConfigError as error:
        raise ServiceError(
            "the services' state cannot be read", got=error, fix="Run make down, then make up."
        ) from None
    if state is None:
        raise ServiceError(
            "services are not up", expected=f"{STATE_FILE} of running services", fix="Run make up."
        )
    return state.endpoints


def service_pids(state_dir: str | Path | None = None) -> list[int]:
    """Pid of the supervisor, whose tree holds all services and what the worker runs; empty when
    nothing is up.
    """
    state = read_state(resolve_state_dir(state_dir))
    return [state.supervisor.pid] if state is not None and state.supervisor is not None else []
