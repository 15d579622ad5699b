"""Ending a run ends exactly the processes that carry its id."""

from __future__ import annotations

import os
import subprocess
import uuid

import psutil
import pytest

from components.system.processes import RUN_VARIABLE, ProcessIdentity, run_processes, stop_run


def _start(run_id: str, command: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, RUN_VARIABLE: run_id}
    process = subprocess.Popen(
        ["sh", "-c", command], env=environment, start_new_session=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_only_processes_of_the_run_are_ended_orphans_included() -> None:
    run_id, other_id = uuid.uuid4().hex, uuid.uuid4().hex
    parent = _start(run_id, "(trap '' HUP; sleep 60) & echo ready; wait")
    other = _start(other_id, "echo ready; exec sleep 60")
    try:
        parent.kill()
        parent.wait()
        assert run_processes(run_id), "the orphan is found although its parent is gone"
        assert stop_run(run_id, supervisor=None) == 0
        assert run_processes(run_id) == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_recycled_supervisor_pid_is_never_signalled() -> None:
    other = _start(uuid.uuid4().hex, "echo ready; exec sleep 60")
    try:
        stop_run(uuid.uuid4().hex, supervisor=ProcessIdentity.of(other.pid))
        assert other.poll() is None, "same pid and start time, but another run's environment"
        assert ProcessIdentity(pid=other.pid, start_ticks=1).find() is None
    finally:
        other.kill()
        other.wait()


def test_a_corrected_clock_makes_no_other_process_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # The wall clock was set a second on since: seconds since the epoch tell another start.
    identity = ProcessIdentity.of(os.getpid())
    told = psutil.Process().create_time()
    monkeypatch.setattr(psutil.Process, "create_time", lambda _process: told + 1.0)
    found = identity.find()
    assert found is not None and found.pid == os.getpid()
    assert identity == ProcessIdentity.of(os.getpid())


def test_services_of_an_earlier_version_are_found_by_their_run() -> None:
    run_id = uuid.uuid4().hex
    process = _start(run_id, "echo ready; exec sleep 60")
    try:
        old = ProcessIdentity.model_validate({"pid": process.pid, "started_at_s": 1.0})
        found = old.find()
        assert found is not None and found.pid == process.pid
        assert ProcessIdentity.model_validate({"pid": os.getpid(), "started_at_s": 1.0}).find() is (
            None
        )
        assert stop_run(run_id, supervisor=old) == 0
        assert process.wait(timeout=60) is not None
    finally:
        process.kill()
        process.wait()
