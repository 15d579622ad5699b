"""Which code runs: written beside every dataset, checkpoint and release."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

PACKAGE = "dspark-pipeline"


def code_revision() -> str:
    """Git commit of the code that runs, '-dirty' with uncommitted changes; outside a checkout the
    package's version.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return metadata.version(PACKAGE)

    return described.stdout.strip()
