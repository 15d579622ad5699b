"""`dspark gate`: measure a drafter and decide on it, or decide on what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from components.cli.output import Json

NOT_MEASURED = 3


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Work")(gate)


def gate(
    recipe: Annotated[str, typer.Option(help="Name in configs/ or path of a YAML file.")],
    size: Annotated[str | None, typer.Option(help="Overlay of the recipe.")] = None,
    candidate: Annotated[
        Path | None, typer.Option(help="Checkpoint folder to measure on vLLM.")
    ] = None,
    champion: Annotated[
        Path | None,
        typer.Option(help="Checkpoint folder it is compared with, on the same prompts."),
    ] = None,
    target: Annotated[
        Path | None, typer.Option(help="Folder of the target; without it the recipe's own.")
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option(help="Folder for report, decision, page, plots and logs.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="A report measured before, to decide on.")
    ] = None,
    decision: Annotated[
        Path | None, typer.Option(help="A decision to check against --report.")
    ] = None,
    fingerprint: Annotated[
        Path | None, typer.Option(help="TargetFingerprint as JSON that the report must be about.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the decision here.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a drafter on vLLM as served and decide on it, or decide on a report.

    Exits with 0 for pass, 1 for fail, 2 for inconclusive, 3 when nothing could be measured or
    decided. Example: dspark gate --recipe demo --candidate DIR --out-dir gate
    """
    from components.stages.gate.command import main

    given = {
        "--recipe": recipe,
        "--size": size,
        "--candidate": candidate,
        "--champion": champion,
        "--target": target,
        "--out-dir": out_dir,
        "--report": report,
        "--decision": decision,
        "--fingerprint": fingerprint,
        "--out": out,
    }
    arguments = [
        word for name, value in given.items() if value is not None for word in (name, str(value))
    ]
    raise typer.Exit(main([*arguments, *(["--json"] if as_json else [])]))
