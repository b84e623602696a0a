"""Run a study, or the rest of it, and write its tables: `python -m studies NAME`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from blips.errors import BlipsError, ConfigError
from studies.reproduce import STUDIES, reproduce

app = typer.Typer(name="python -m studies", pretty_exceptions_enable=False)


@app.command()
def run(
    study: Annotated[str, typer.Argument(help=", ".join(STUDIES))],
    settings: Annotated[
        list[str] | None, typer.Argument(help="options of the study, such as model=chgnet")
    ] = None,
    profile: Annotated[str, typer.Option(help="quick, default or paper")] = "default",
    workers: Annotated[
        int | None, typer.Option(help="runs side by side, one thread each; default: all cores")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help='runs to do, such as "egnn-blip*"; repeatable')
    ] = None,
    folder: Annotated[Path, typer.Option(help="for results and tables")] = Path("results"),
    runs: Annotated[Path, typer.Option(help="for checkpoints and logs")] = Path("runs"),
) -> None:
    """Run a study, or the rest of it, and write its tables.

    Example: python -m studies nbody --profile quick --only "egnn-base-seed0"
    """
    options = dict(_pair(text) for text in settings or [])
    outcome = reproduce(
        study,
        profile,
        workers=workers,
        only=only or (),
        options=options,
        folder=folder,
        runs=runs,
    )
    if outcome.failed:
        raise typer.Exit(1)


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not (key and separator and value):
        raise ConfigError(f"cannot read {text!r}; options of a study are key=value")
    return key, value


def main() -> None:
    """Run the command; problems of the user's are one line, not a traceback."""
    try:
        app()
    except BlipsError as error:
        typer.secho(f"studies: {error}", fg="red", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
