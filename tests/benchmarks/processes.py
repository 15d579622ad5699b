"""Benchmarks that need a process of their own: its last line is JSON."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from components.errors import ServiceError
from components.services.endpoints import REPO_DIR


def last_json(command: list[str], environment: Mapping[str, str] = os.environ) -> Any:
    """Run a command from the repository and read the last line it prints.

    Raises:
        ServiceError: it failed.
    """
    result = subprocess.run(
        command, cwd=REPO_DIR, env=dict(environment), capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise ServiceError("a benchmark's process failed", got=result.stderr[-800:])
    return json.loads(result.stdout.strip().splitlines()[-1])
