"""Ports: free ones, taken ones, and what a user is told."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from components.errors import PortInUseError, ServiceError
from components.services.ports import PORT_FIELDS, resolve_ports
from components.settings import ServicesSettings
from components.system.ports import MAX_PORT, free_port, is_free, port_holder

ALL_FREE = dict.fromkeys(PORT_FIELDS, 0)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def test_a_listening_port_is_not_free_and_its_holder_is_named(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert not is_free(port)
    assert f"pid {os.getpid()}" in port_holder(port)


def test_free_port_passes_over_taken_ones(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert free_port(port) > port
    base = free_port()
    assert free_port(base, taken=frozenset({base})) > base


def test_free_port_gives_up_with_an_error_when_nothing_is_left() -> None:
    with pytest.raises(ServiceError, match="no free port"):
        free_port(MAX_PORT, taken=frozenset({MAX_PORT}))


def test_zero_ports_become_distinct_free_ones() -> None:
    resolved = resolve_ports(ServicesSettings(**ALL_FREE))
    ports = [getattr(resolved, name) for name in PORT_FIELDS]
    assert len(set(ports)) == len(PORT_FIELDS)
    assert all(is_free(port) for port in ports)


def test_a_configured_port_in_use_names_setting_port_and_holder(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(
        PortInUseError, match=rf"mlflow_port is taken; got port {port} held by .*pid {os.getpid()}"
    ):
        resolve_ports(ServicesSettings(**{**ALL_FREE, "mlflow_port": port}))


def test_two_settings_with_one_port_are_refused() -> None:
    port = free_port()
    with pytest.raises(ServiceError, match="ask for the same port"):
        resolve_ports(ServicesSettings(**{**ALL_FREE, "mlflow_port": port, "haproxy_port": port}))
