"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_services import Services, running_services
from tiny_target import make_tiny_target

# A run in the background inherits an ignored SIGINT, and so would every process whose Ctrl-C is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama target (4 layers, hidden 64, vocabulary 512, ChatML); read-only by agreement."""
    return make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Prefect, MLflow, the store, HAProxy and all deployments, for every test that leaves them as they are."""
    with running_services(tmp_path_factory.mktemp("services")) as services:
        yield services
