"""What the services of `make up` need."""

from __future__ import annotations

from pydantic import Field

from components.settings.base import Settings


class ServicesSettings(Settings):
    """Ports and folders of the services that `make up` runs.

    Port 0 takes a free one at `make up`; the resolved ports are in `<state_dir>/services.json`.
    Another file than `configs/services.yaml` is read where the variable DSPARK_SERVICES names one.
    """

    host: str = Field(
        default="127.0.0.1",
        description="Address that the services listen on and are reached at; engines always listen"
        " on loopback.",
    )
    state_dir: str = Field(
        default=".dspark",
        description="Folder of databases, caches, datasets, runs and logs, relative to the"
        " repository; the variable DSPARK_STATE_DIR wins over it.",
    )
    prefect_port: int = Field(
        default=4200, description="Port of the Prefect server and of its web page."
    )
    mlflow_port: int = Field(
        default=5000, description="Port of the MLflow server and of its web page."
    )
    mooncake_rpc_port: int = Field(
        default=50051,
        description="Port of the Mooncake master, which engines and trainers ask for samples.",
    )
    mooncake_metrics_port: int = Field(
        default=9003, description="Port of the Mooncake master's metrics."
    )
    mooncake_segment_mib: int = Field(
        default=512,
        ge=64,
        description="Memory in MiB that an extraction engine gives to the store; it must be a"
        " little more than seven sixteenths of `stream.budget_mib`.",
    )
    haproxy_port: int = Field(
        default=8080, description="Port that clients send chat completions to."
    )
    haproxy_stats_port: int = Field(
        default=8404, description="Port of HAProxy's statistics page and metrics."
    )
    engine_port_base: int = Field(
        default=8100,
        description="First port that is tried for an engine; each further one takes the next that"
        " is free.",
    )
    startup_timeout_s: float = Field(
        default=120,
        gt=0,
        description="Seconds within which all services must be healthy at `make up`, before it"
        " gives up and ends them again.",
    )
