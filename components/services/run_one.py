"""Run one line of the Procfile in the foreground: `python -m components.services.run_one prefect`.

For places where something else supervises (a container per service): the same command and the same
environment as under `make up`, on the ports of configs/services.yaml. `components.services.prepare`
must have run before.
"""

from __future__ import annotations

import os
import sys

from honcho.environ import parse_procfile

from components.errors import ConfigError, ServiceError, run_main
from components.services.endpoints import REPO_DIR, read_state, resolve_state_dir
from components.services.prepare import PROCFILE, service_environment


def main(arguments: list[str]) -> None:
    """Replace this process by the named service.

    Raises:
        ConfigError: the Procfile has no such service.
        ServiceError: nothing has been prepared.
    """
    commands = parse_procfile(PROCFILE.read_text()).processes
    if len(arguments) != 1 or arguments[0] not in commands:
        raise ConfigError(
            "no such service", got=" ".join(arguments) or None, expected=" | ".join(commands)
        )

    state_dir = resolve_state_dir()
    state = read_state(state_dir)
    if state is None:
        raise ServiceError(
            "services are not prepared", fix="Run python -m components.services.prepare first."
        )

    environment = service_environment(state.settings, state_dir=state_dir, run_id=state.run_id)
    os.chdir(REPO_DIR)
    os.execve("/bin/sh", ["/bin/sh", "-c", commands[arguments[0]]], environment)


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
