"""`dspark report`: what a run came to."""

from __future__ import annotations

from typing import Annotated

import typer

from components.cli.output import Json


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Work")(report)


def report(
    run: Annotated[
        str | None, typer.Option(help="Name of the run; without it the newest report of all.")
    ] = None,
    followed: Annotated[
        int, typer.Option(help="Exit code of what followed the run, for scripts.", hidden=True)
    ] = 0,
    as_json: Json = False,
) -> None:
    """Show the report of a run: what was measured, what failed, what serves now, what to do.

    Exits with 0 for a drafter that was promoted or a release that stays because the new one is no
    better, 1 for a run that failed, 4 for a gate that failed, 5 for one that is inconclusive, 6
    for a canary that was rolled back. Example: dspark report --json
    """
    from components.reporting import show
    from components.services.endpoints import resolve_state_dir

    state_dir = resolve_state_dir()
    if as_json:
        print(show.newest_report(state_dir, run=run).read_text())
        return
    arguments = [str(state_dir), "--followed", str(followed)]
    if run is not None:
        arguments += ["--run", run]
    raise typer.Exit(show.main(arguments))
