"""Real services for tests, on free ports, in a state folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

from components.services.endpoints import REPO_DIR, STATE_FILE, ServicesState
from components.services.ports import PORT_FIELDS

START_TIMEOUT_S = 300


class Services:
    """The service commands of the Makefile against one state folder, each in a process of its own.

    Args:
        folder: gets the settings file and, under `state/`, everything the services write. Keep its path short: a Unix
            socket lies in it.
    """

    def __init__(self, folder: Path) -> None:
        self.state_dir = folder / "state"
        self.settings = {
            **dict.fromkeys(PORT_FIELDS, 0),
            "state_dir": str(self.state_dir),
            "startup_timeout_s": START_TIMEOUT_S,
        }
        self._settings_path = folder / "services.yaml"
        self.environment = {**os.environ, "DSPARK_SERVICES": str(self._settings_path)}
        for name in ("DSPARK_STATE_DIR", "PREFECT_API_URL"):
            self.environment.pop(name, None)

    def write_settings(self) -> None:
        """Write `settings` where DSPARK_SERVICES points."""
        self._settings_path.write_text(yaml.safe_dump(self.settings))

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`python -m components.services.<command>`, settings written first."""
        self.write_settings()
        return self.python("-m", f"components.services.{command}", *arguments)

    def python(self, *arguments: str, timeout_s: float = START_TIMEOUT_S + 60) -> subprocess.CompletedProcess[str]:
        """This interpreter with the environment that points at these services."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=REPO_DIR,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    @property
    def state(self) -> ServicesState:
        """Of the running services."""
        return ServicesState.read(self.state_dir / STATE_FILE)
