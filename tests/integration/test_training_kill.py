"""A training process that is killed, wherever it is: it loses no more than the interval, and no
loss changes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks.training_loop import NUM_PACKS, killable

pytestmark = [pytest.mark.integration, pytest.mark.long]

CHILD = """
import sys
from pathlib import Path
from tests.benchmarks.training_loop import killable
killable(Path(sys.argv[1]))
"""
CHECKPOINT_EVERY_STEPS = 5


def run_and_kill(folder: Path, *, after_packs: int, delay_s: float) -> list[int]:
    """Packs that a process began before it died of SIGKILL; all of its run where it was quicker."""
    packs: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("pack "):
                packs.append(int(line.split()[1]))
            if len(packs) == after_packs:
                time.sleep(delay_s)  # into the step, or into the writing of a state
                process.kill()  # and read on: it may be packs further than what has been read of it
        process.wait(timeout=600)
    return packs


def test_kills_at_random_steps_cost_no_more_than_the_interval_and_change_no_loss(
    tiny_target: Path, tmp_path: Path
) -> None:
    rng = random.Random(4)
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
        (folder / "target").symlink_to(tiny_target)
    killable(folders[0])
    started_at = 0
    for _ in range(2):
        packs = run_and_kill(
            folders[1], after_packs=rng.randint(8, 25), delay_s=rng.uniform(0, 0.05)
        )
        assert started_at - CHECKPOINT_EVERY_STEPS <= packs[0] <= started_at + 1
        started_at = packs[-1]
    packs = run_and_kill(folders[1], after_packs=10**6, delay_s=0)
    assert (
        started_at - CHECKPOINT_EVERY_STEPS <= packs[0] <= started_at + 1
        and packs[-1] == NUM_PACKS - 1
    )
    whole, killed = (json.loads((folder / "curve.json").read_text()) for folder in folders)
    assert len(whole) == len(killed) == NUM_PACKS
    assert killed == pytest.approx(whole, abs=1e-6)
