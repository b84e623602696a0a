"""Commands that run studies: demo, reproduce."""

from pathlib import Path
from typing import Annotated

import typer

from blips.cli.app import Seed, app
from blips.errors import ConfigError


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="where everything goes")] = Path("runs/demo"),
    epochs: Annotated[int | None, typer.Option(help="fewer for a quick look")] = None,
    seed: Seed = 0,
) -> None:
    """Train, calibrate and test a Bayesian potential for ammonia on the shipped data."""
    from blips.experiments.demo import run_demo

    run_demo(folder, epochs=epochs, seed=seed)


@app.command()
def reproduce(
    study: Annotated[str, typer.Argument(help="nbody, ammonia, silica, matpes or active")],
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
    """Run a study of the paper, or the rest of it, and write its tables."""
    from blips.experiments.reproduce import reproduce

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
