"""The ports that the services will listen on."""

from __future__ import annotations

from components.errors import PortInUseError, ServiceError
from components.settings import ServicesSettings
from components.system.ports import free_port, is_free, port_holder

PORT_FIELDS = (
    "prefect_port",
    "mlflow_port",
    "mooncake_rpc_port",
    "mooncake_metrics_port",
    "haproxy_port",
    "haproxy_stats_port",
)
"""Fields of `ServicesSettings` a service listens on. `engine_port_base` is only where a search
starts.
"""


def resolve_ports(settings: ServicesSettings) -> ServicesSettings:
    """Replace every port 0 by a free one and check that the others can be bound.

    Raises:
        PortInUseError: a configured port is held by another process; the setting and the holder are
            named.
        ServiceError: two settings ask for the same port.
    """
    fixed = {name: port for name in PORT_FIELDS if (port := getattr(settings, name)) != 0}
    for name, port in fixed.items():
        twins = [other for other, value in fixed.items() if value == port and other != name]
        if twins:
            raise ServiceError(
                f"{name} and {twins[0]} ask for the same port", got=port, expected="distinct ports"
            )
        if not is_free(port, host=settings.host):
            raise PortInUseError(
                f"{name} is taken",
                got=f"port {port} held by {port_holder(port)}",
                fix=f"End that process, or set {name} in configs/services.yaml (0 takes a "
                "free port).",
            )

    taken = set(fixed.values())
    chosen = dict(fixed)
    for name in PORT_FIELDS:
        if name not in chosen:
            chosen[name] = free_port(host=settings.host, taken=frozenset(taken))
            taken.add(chosen[name])

    return settings.model_copy(update=chosen)
