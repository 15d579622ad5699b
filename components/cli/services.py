"""`dspark up`, `down` and `status`: the services, and what serves."""

from __future__ import annotations

from typing import Any

import typer

from components.cli.output import Json, lines_for_people, print_json, print_table


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Services")(up)
    app.command(rich_help_panel="Services")(down)
    app.command(rich_help_panel="Services")(status)


def up(as_json: Json = False) -> None:
    """Start Prefect, MLflow, Mooncake, HAProxy and the deployments; wait until all are healthy.

    Does nothing where they are up. Example: dspark up
    """
    from components.services.up import bring_up

    with lines_for_people(as_json):
        endpoints = bring_up()
    if as_json:
        print_json(endpoints.model_dump(mode="json"))


def down(as_json: Json = False) -> None:
    """End everything that `dspark up` started, engines and runs included.

    Example: dspark down
    """
    from components.services.down import bring_down

    with lines_for_people(as_json):
        num_killed = bring_down()
    if as_json:
        print_json({"up": False, "num_killed": num_killed})


def status(as_json: Json = False) -> None:
    """Show which services are usable and what answers at the endpoint.

    Exits with 1 where a service is not usable, or none is up. Example: dspark status --json
    """
    told = _status()
    if as_json:
        print_json(told)
    else:
        _show(told)
    if not told["up"] or any(told["services"].values()):
        raise typer.Exit(1)


def _status() -> dict[str, Any]:
    from pathlib import Path

    from components.services.deployments import prefect_file
    from components.services.endpoints import read_state, resolve_state_dir
    from components.services.health import build_checks
    from components.serving.rollout.production import ProductionEngine

    state_dir = resolve_state_dir()
    state = read_state(state_dir)
    if state is None:
        return {"up": False, "state_dir": str(state_dir), "services": {}, "serving": None}
    checks = build_checks(state.endpoints, prefect_file=prefect_file())
    production = ProductionEngine.find(Path(state.endpoints.state_dir) / "run")
    return {
        "up": True,
        "state_dir": str(state_dir),
        "services": {name: check() for name, check in checks.items()},
        "addresses": state.endpoints.model_dump(mode="json"),
        "serving": production.endpoint.model_dump(mode="json") if production else None,
    }


def _show(told: dict[str, Any]) -> None:
    if not told["up"]:
        print(f"services are not up (state folder {told['state_dir']}); start them: dspark up")
        return

    rows = [(name, "ok" if reason is None else reason) for name, reason in told["services"].items()]
    print_table(("service", "state"), rows)
    serving = told["serving"]
    url = f"{told['addresses']['haproxy_url']}/v1/chat/completions"

    if serving is None:
        print(f"\nnothing serves: {url} answers HTTP 503 until a drafter is promoted")
    elif serving["checkpoint_digest"] is None:
        print(f"\n{serving['model']} serves without a drafter at {url}")
    else:
        digest = serving["checkpoint_digest"][:12]
        print(f"\n{serving['model']} serves with drafter {digest} at {url}")
