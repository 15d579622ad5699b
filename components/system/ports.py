"""TCP ports: which are free, and who holds one."""

from __future__ import annotations

import socket

import psutil

from components.errors import ServiceError

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


def free_port(
    base: int = 0, *, host: str = "127.0.0.1", taken: frozenset[int] = frozenset()
) -> int:
    """The first free port at or above `base`; with base 0, one the kernel chooses. Ports in `taken`
    are passed over.

    Nothing reserves the port: start the server at once, and treat a failed bind as a reason to ask
    again.

    Raises:
        ServiceError: no port from `base` up is free.
    """
    if base == 0:
        return _ephemeral_port(host=host, taken=taken)
    for port in range(base, MAX_PORT + 1):
        if port not in taken and is_free(port, host=host):
            return port
    raise ServiceError(
        "no free port",
        got=f"every port from {base} to {MAX_PORT} is taken",
        expected="one free port",
    )


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
        if (
            connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == port
        ):
            if connection.pid is None:
                break
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.NoSuchProcess:
                break

    return "an unknown process"
