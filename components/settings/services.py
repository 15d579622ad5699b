"""What the services of `make up` need."""

from __future__ import annotations

from pydantic import Field

from components.settings.base import Settings


class ServicesSettings(Settings):
    """Ports and folders of the services that `make up` runs. Port 0 takes a free one at `up`."""

    host: str = "127.0.0.1"
    state_dir: str = Field(
        default=".dspark", description="databases, caches, logs, artifacts; relative to the repo"
    )
    prefect_port: int = 4200
    mlflow_port: int = 5000
    mooncake_rpc_port: int = 50051
    mooncake_metrics_port: int = 9003
    mooncake_segment_mib: int = Field(
        default=512, ge=64, description="store memory an extraction engine contributes"
    )
    haproxy_port: int = Field(default=8080, description="where clients send chat completions")
    haproxy_stats_port: int = 8404
    engine_port_base: int = Field(
        default=8100, description="engines take this port and the next ones, if free"
    )
    startup_timeout_s: float = Field(default=120, gt=0)
