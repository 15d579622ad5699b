"""`dspark run`: one run of a flow, followed to its end."""

from __future__ import annotations

import json
import sys
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from components.cli.output import Json, lines_for_people, print_json


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Work")(run)


def run(
    flow: Annotated[str, typer.Argument(help="A flow of prefect.yaml, e.g. drafter-lifecycle.")],
    recipe: Annotated[str, typer.Argument(help="Name of a recipe in configs/.")] = "demo",
    size: Annotated[str | None, typer.Option(help="Overlay of the recipe, e.g. full.")] = None,
    target: Annotated[
        str | None, typer.Option(help="'published', 'source', or a folder of the target.")
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(help="Another parameter of the flow as KEY=JSON; may be given again."),
    ] = None,
    run_name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(help="The run is cancelled after so many seconds; without it, never."),
    ] = None,
    follow: Annotated[
        bool, typer.Option(help="Show its lines and wait for its end; Ctrl-C cancels it.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Run a flow on a recipe and show its lines, as `prefect deployment run --watch` does.

    Exits with 0 where the run ends well, 1 where it does not. Example: dspark run
    drafter-lifecycle demo --size full
    """
    deployment = f"{_flow(flow)}/{_deployment(flow, recipe)}"
    parameters = _parameters(recipe, size, target, param or [])
    if not follow:
        _start(deployment, parameters, run_name, as_json=as_json)
        return

    from components.services.follow import COMPLETED, run_to_end

    with lines_for_people(as_json):
        ended = run_to_end(deployment, parameters=parameters, name=run_name, timeout_s=timeout_s)
    if as_json:
        print_json(ended)
    raise typer.Exit(0 if ended["state"] == COMPLETED else 1)


def _known() -> dict[str, list[str]]:
    """Deployments by flow, as `prefect.yaml` has them."""
    import yaml

    from components.services.deployments import prefect_file

    known: dict[str, list[str]] = {}
    for one in yaml.safe_load(prefect_file().read_text())["deployments"]:
        flow = one["entrypoint"].rpartition(".")[2].replace("_", "-")
        known.setdefault(flow, []).append(one["name"])
    return known


def _flow(flow: str) -> str:
    known = _known()
    if flow not in known:
        near = get_close_matches(flow, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise typer.BadParameter(f"no flow '{flow}'{hint} There are {', '.join(known)}.")
    return flow


def _deployment(flow: str, recipe: str) -> str:
    """The deployment of that recipe, or the flow's first one: it takes any recipe."""
    names = _known()[flow]
    return recipe if recipe in names else names[0]


def _parameters(
    recipe: str, size: str | None, target: str | None, further: list[str]
) -> dict[str, Any]:
    given: dict[str, Any] = {"recipe": recipe}
    if size is not None:
        given["size"] = size

    if target is not None:
        given["target"] = target
    for one in further:
        key, is_pair, value = one.partition("=")
        if not is_pair:
            raise typer.BadParameter(f"--param takes KEY=JSON, got {one!r}")
        try:
            given[key] = json.loads(value)
        except ValueError:
            raise typer.BadParameter(
                f"--param {key}: {value!r} is not JSON; a text needs quotes within: '\"...\"'"
            ) from None

    return given


def _start(
    deployment: str, parameters: dict[str, Any], run_name: str | None, *, as_json: bool
) -> None:
    from components.services.endpoints import load_endpoints
    from components.services.follow import PrefectApi

    api = PrefectApi(load_endpoints().prefect_api_url)
    started = api.create_run(deployment, parameters=parameters, name=run_name)
    if as_json:
        print_json({"id": started["id"], "name": started["name"], "state": "SCHEDULED"})
        return
    print(f"run {started['name']} of {deployment} is scheduled", file=sys.stderr)
    print(started["id"])
