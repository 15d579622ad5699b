"""The command `dspark`. Each module of this package adds its commands; heavy imports stay inside
them, so that help is there at once.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated

import typer

from components.cli import doctor, gate, report, run, services
from components.errors import DSparkError

INTERRUPTED = 130
USAGE = 2

app = typer.Typer(
    name="dspark",
    help="Keeps a speculative-decoding drafter trained, measured, deployed and in step with its"
    " target.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for module in (services, run, gate, report, doctor):
    module.add_to(app)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"dspark {metadata.version('dspark-pipeline')}")
        raise typer.Exit


@app.callback()
def _common(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that every command has."""


def invoke(arguments: list[str]) -> int:
    """Run a command line; the exit code.

    A wrong command line exits with 2 (with 3 where the command is `gate`, whose 2 is a verdict), an
    error of ours with 1 (`gate`: 3) and one message, Ctrl-C with 130. Anything else is a bug and
    keeps its traceback.
    """
    is_gate = arguments[:1] == ["gate"]
    try:
        code = app(arguments, prog_name="dspark", standalone_mode=False)
    except typer.TyperException as error:
        error.show()  # type: ignore[attr-defined]  # all that typer raises have it
        return gate.NOT_MEASURED if is_gate else USAGE
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return gate.NOT_MEASURED if is_gate else 1
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the package."""
    sys.exit(invoke(sys.argv[1:]))


if __name__ == "__main__":
    main()
