"""What a flow's process loads before its first task: every run starts one."""

from __future__ import annotations

import subprocess
import sys

from components.services.endpoints import REPO_DIR


def test_flows_start_without_torch() -> None:
    """torch costs two seconds and 180 MB, and tensors are handled in the trainer's and the engines'
    processes only.
    """
    code = (
        "import sys, flows.drafter_lifecycle; print('torch' in sys.modules, 'vllm' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO_DIR, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip().splitlines()[-1] == "False False"
