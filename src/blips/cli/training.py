"""Commands that make models: train, finetune, export."""

from pathlib import Path
from typing import Annotated

import typer

from blips.cli.app import Files, Model, app


@app.command()
def train(
    sources: Files,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run")] = False,
) -> None:
    """Train a potential: blips train config.yaml training.epochs=50."""
    from blips.train.command import train_from_config

    result = train_from_config(sources, resume=resume)
    typer.echo(f"best validation loss {result.progress.best_loss:.6g}, run in {result.folder}")


@app.command()
def finetune(
    sources: Files,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run")] = False,
) -> None:
    """Train a released potential further: blips finetune config.yaml data.train=my.extxyz."""
    from blips.train.command import train_from_config

    result = train_from_config(sources, resume=resume, only_released=True)
    typer.echo(f"best validation loss {result.progress.best_loss:.6g}, run in {result.folder}")


@app.command()
def export(
    model: Model,
    output: Annotated[Path, typer.Argument(help="file to write")],
) -> None:
    """Write a fine-tuned potential, its posterior means, as a checkpoint of its own package."""
    from blips.train.command import export_model

    typer.echo(f"{export_model(model, output)} written, for the package that the model is from")
