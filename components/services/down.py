"""`make down`: end every process that `make up` started, wait for it, and remove the state file."""

from __future__ import annotations

from components.errors import ServiceError, run_main
from components.services.endpoints import STATE_FILE, ServicesState, resolve_state_dir
from components.services.up import exclusive
from components.system.processes import run_processes, stop_run


def bring_down() -> int:
    """End the services; returns how many processes had to be killed. No error when none is up.

    Raises:
        ServiceError: a process outlived SIGKILL.
    """
    state_dir = resolve_state_dir()
    with exclusive(state_dir):
        path = state_dir / STATE_FILE
        if not path.is_file():
            print("services are not up")
            return 0
        state = ServicesState.read(path)
        num_killed = stop_run(state.run_id, supervisor=state.supervisor)
        left = run_processes(state.run_id)
        if left:
            raise ServiceError(
                "processes outlived SIGKILL",
                got=", ".join(f"pid {process.pid}" for process in left),
            )
        path.unlink()

    print(
        "services are down" + (f" ({num_killed} processes had to be killed)" if num_killed else "")
    )
    return num_killed


def main() -> None:
    """See `bring_down`."""
    bring_down()


if __name__ == "__main__":
    run_main(main)
