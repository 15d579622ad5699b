"""TCP ports: which are free, who holds one, and what the services will listen on."""

from __future__ import annotations

import socket

import psutil

from components.errors import PortInUseError, ServiceError
from components.settings import ServicesSettings

PORT_FIELDS = (
    "prefect_port",
    "mlflow_port",
    "mooncake_rpc_port",
    "mooncake_metrics_port",
    "haproxy_port",
    "haproxy_stats_port",
)
"""Fields of `ServicesSettings` a service listens on. `engine_port_base` is only where a search starts."""

MAX_PORT = 65535


def is_free(port: int, *, host: str = "127.0.0.1") -> bool:
    """Whether a server could bind `host:port` now.

    SO_REUSEADDR is set, as servers set it, so that a port in TIME_WAIT counts as free.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(base: int = 0, *, host: str = "127.0.0.1", taken: frozenset[int] = frozenset()) -> int:
    """The first free port at or above `base`; with base 0, one the kernel chooses. Ports in `taken` are passed over.

    Nothing reserves the port: start the server at once, and treat a failed bind as a reason to ask again.

    Raises:
        ServiceError: no port from `base` up is free.
    """
    if base == 0:
        return _ephemeral_port(host=host, taken=taken)
    for port in range(base, MAX_PORT + 1):
        if port not in taken and is_free(port, host=host):
            return port
    raise ServiceError("no free port", got=f"every port from {base} to {MAX_PORT} is taken", expected="one free port")


def _ephemeral_port(*, host: str, taken: frozenset[int]) -> int:
    held: list[socket.socket] = []
    try:
        while True:
            probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            held.append(probe)  # kept open, so that the kernel cannot offer a refused port again
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
            if port not in taken:
                return port
    finally:
        for probe in held:
            probe.close()


def port_holder(port: int) -> str:
    """Who listens on `port`: 'name (pid N)', or a phrase saying that it cannot be told."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return "a process of another user"
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                break
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.NoSuchProcess:
                break
    return "an unknown process"


def resolve_ports(settings: ServicesSettings) -> ServicesSettings:
    """Replace every port 0 by a free one and check that the others can be bound.

    Raises:
        PortInUseError: a configured port is held by another process; the setting and the holder are named.
        ServiceError: two settings ask for the same port.
    """
    fixed = {name: port for name in PORT_FIELDS if (port := getattr(settings, name)) != 0}
    for name, port in fixed.items():
        twins = [other for other, value in fixed.items() if value == port and other != name]
        if twins:
            raise ServiceError(f"{name} and {twins[0]} ask for the same port", got=port, expected="distinct ports")
        if not is_free(port, host=settings.host):
            raise PortInUseError(
                f"{name} is taken",
                got=f"port {port} held by {port_holder(port)}",
                fix=f"End that process, or set {name} in configs/services.yaml (0 takes a free port).",
            )
    taken = set(fixed.values())
    chosen = dict(fixed)
    for name in PORT_FIELDS:
        if name not in chosen:
            chosen[name] = free_port(host=settings.host, taken=frozenset(taken))
            taken.add(chosen[name])
    return settings.model_copy(update=chosen)
