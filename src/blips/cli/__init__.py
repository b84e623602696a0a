"""The `blips` command. Heavy imports are inside the commands, so that help is quick."""

import sys

import typer

from blips.cli import bench, configuration, prediction, studies, training
from blips.cli.app import app
from blips.errors import BlipsError

__all__ = ["app", "bench", "configuration", "main", "prediction", "studies", "training"]


def main() -> None:
    """Run the command; problems of the user's are one line, not a traceback."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except BlipsError as error:
        if debug:
            raise
        typer.secho(f"blips: {error}", fg="red", err=True)
        sys.exit(2)
