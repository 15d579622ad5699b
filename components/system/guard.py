"""Runs one command and makes sure that nothing of it outlives its owner. Standard library only.

    python -I guard.py OWNER_FILE GRACE_S COMMAND...

OWNER_FILE holds the owner's pid and start time; it is read again and again, so a process can hand
its engine over to another one by writing that one's identity into it.

The guard leads a session of its own, adopts orphans of that session (Linux subreaper), and ends
everything in it when the command ends, when it gets SIGTERM or SIGINT, or when the owner is gone,
even by SIGKILL. PR_SET_PDEATHSIG on the engine alone would not do: it fires when the *thread* that
started the child ends, and does not reach grandchildren. vLLM leaves the sockets between its
processes where it made them, so they get a folder that goes with the guard.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.25
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None when it is gone or a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def session_members(session_id: int) -> list[int]:
    """Live processes of a session and all their descendants, wherever those have moved to, without
    the leader.
    """
    stats = {
        pid: fields
        for pid in _all_pids()
        if (fields := _stat(pid)) is not None and fields[0] not in "ZX"
    }
    members = {pid for pid, fields in stats.items() if int(fields[3]) == session_id}
    members.add(session_id)

    while True:
        found = {pid for pid, fields in stats.items() if int(fields[1]) in members} - members
        if not found:
            break
        members |= found

    return sorted((members & stats.keys()) - {session_id})


def peak_resident_bytes(pid: int) -> int:
    """Largest resident set a process ever had, bytes; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def kill_all(pids: list[int], signal_number: int) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal_number)


def _all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]  # noqa: PTH208 - names, not paths


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on: [0] state, [1] parent, [3] session, [19] start
    time.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def _die_with_guard() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def write_owner(owner_file: Path, pid: int) -> None:
    """Make `pid` the owner, in one step. Raises ProcessLookupError when there is no such
    process.
    """
    start = process_start(pid)
    if start is None:
        raise ProcessLookupError(f"no process {pid}")
    temporary = owner_file.with_name(owner_file.name + ".new")
    temporary.write_text(f"{pid} {start}\n")
    temporary.replace(owner_file)


def _owner_lives(owner_file: Path) -> bool:
    """False as well when the file is gone: whoever removed it wants the engine gone, and no owner
    is left to end it.
    """
    try:
        pid, start = owner_file.read_text().split()
    except FileNotFoundError:
        return False
    return process_start(int(pid)) == int(start)


def main(arguments: list[str]) -> int:
    """Run the command until it ends, a signal comes or the owner is gone; leave no process
    behind.
    """
    with tempfile.TemporaryDirectory(prefix="engine-", ignore_cleanup_errors=True) as sockets:
        os.environ[SOCKETS_VARIABLE] = sockets
        return _run(Path(arguments[0]), float(arguments[1]), arguments[2:])


def _run(owner_file: Path, grace_s: float, command: list[str]) -> int:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)
    # The guard is single-threaded, so the thread that PDEATHSIG watches is the guard itself.
    child = subprocess.Popen(command, preexec_fn=_die_with_guard)
    while child.poll() is None and not asked and _owner_lives(owner_file):
        time.sleep(POLL_S)
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    _end_session(grace_s=2.0)
    code = child.wait()
    return code if code >= 0 else 128 - code


def _end_session(*, grace_s: float) -> None:
    """SIGTERM, then SIGKILL, everything left in this session; reap what was adopted."""
    deadline = time.monotonic() + grace_s
    kill_all(session_members(os.getpid()), signal.SIGTERM)
    while members := session_members(os.getpid()):
        if time.monotonic() > deadline:
            kill_all(members, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
