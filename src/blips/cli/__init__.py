"""The `blips` command. Heavy imports are inside the commands, so that help is quick."""

import sys

import typer

from blips.cli import configuration, display, engines, prediction, properties, simulation, training
from blips.cli.app import app
from blips.errors import BlipsError

__all__ = [
    "app",
    "configuration",
    "display",
    "engines",
    "main",
    "prediction",
    "properties",
    "simulation",
    "training",
]


def main() -> None:
    """Run the command; problems of the user's are one line, not a traceback.

    Exit codes: 0 done, 1 the run failed, 2 a mistake of the user's, 130 interrupted.
    """
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except BlipsError as error:
        if debug:
            raise
        typer.secho(f"blips: {error}", fg="red", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if debug:
            raise
        typer.secho(f"blips: {error}; check the path, its permissions and the space", err=True)
        sys.exit(1)
