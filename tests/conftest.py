"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import hypothesis
import pytest
import torch

from tests.support.running_services import Services, running_services
from tests.support.tiny_target import make_tiny_target

# A run in the background inherits an ignored SIGINT, and so would every process whose Ctrl-C is
# tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
PID = os.getpid()


def end_of_run(number: int, _frame: FrameType | None) -> None:
    """A run that is told to end ends its services and engines first."""
    if os.getpid() != PID:  # a child that was forked
        os._exit(128 + number)
    pytest.exit(f"ended by signal {number}", returncode=128 + number)


signal.signal(signal.SIGTERM, end_of_run)

# By default an example that takes longer than 0.2 s fails its test: that measures the machine.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Matrices as small as a test's are many times slower on two threads that share their cores
    with others.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama target (4 layers, hidden 64, vocabulary 512, ChatML); read-only
    by agreement.
    """
    return make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Prefect, MLflow, the store, HAProxy and all deployments, for every test that leaves them as
    they are.
    """
    with running_services(tmp_path_factory.mktemp("services")) as services:
        yield services
