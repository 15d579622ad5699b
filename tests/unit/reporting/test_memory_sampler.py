"""The sampler sees what a child process holds, and copes with processes that come and go."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from components.reporting.memory import MemorySampler, process_bytes, tree_pids

HOLD = "import sys; block = bytearray(80 * 2**20); print('held', flush=True); sys.stdin.read()"


def test_peak_includes_children_and_stays_after_they_end() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        alone = process_bytes(os.getpid()) / 2**20
        with MemorySampler([os.getpid()], interval_s=0.05) as sampler:
            assert child.stdout.readline() == "held\n"
            assert child.pid in tree_pids([os.getpid()])
            deadline = time.monotonic() + 120
            while sampler.peak_mib < alone + 75 and time.monotonic() < deadline:
                time.sleep(0.05)
    finally:
        child.communicate("", timeout=60)
    assert sampler.peak_mib > alone + 75
    assert sampler.num_samples >= 1


def test_roots_may_change_and_end() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=120)
    assert tree_pids([ended.pid]) == set()
    assert process_bytes(ended.pid) == 0
    with MemorySampler(lambda: [ended.pid], interval_s=0.01) as sampler:
        time.sleep(0.05)
    assert sampler.peak_mib == 0.0
