"""The `blips` command. Heavy imports are inside the commands, so that help is quick."""

import sys
import warnings

import typer

from blips.cli import configuration, prediction, properties, simulation, training  # noqa: F401
from blips.cli.shared import app
from blips.errors import BlipsError


def main() -> None:
    """Run the command; problems of the user's are one line, not a traceback.

    Exit codes: 0 done, 1 the run failed, 2 a mistake of the user's, 130 interrupted.
    """
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    else:
        # without the line of code that a warning comes from
        warnings.showwarning = lambda message, *_, **__: typer.secho(
            f"blips: {message}", fg="yellow", err=True
        )
    try:
        app()
    except SystemExit as ended:
        if isinstance(getattr(ended.__context__, "__cause__", None), KeyboardInterrupt):
            raise KeyboardInterrupt from None  # Typer's exit is silent
        raise
    except (BlipsError, OSError, ModuleNotFoundError, MemoryError) as error:
        if debug:
            raise
        typer.secho(f"blips: {_explained(error)}", fg="red", err=True)
        sys.exit(error.exit_code if isinstance(error, BlipsError) else 1)


def _explained(error: Exception) -> str:
    if isinstance(error, BlipsError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is missing; install it with pip"
    if isinstance(error, MemoryError):
        return "out of memory; use smaller structures, or fewer samples"
    return f"{error}; check the path, its permissions and the space"
