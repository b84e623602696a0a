"""Commands that make models: train, finetune, export."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from blips.cli.app import Files, Model, app


@contextmanager
def _resumable(command: str) -> Iterator[None]:
    """Say how to go on after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(
            f"interrupted; blips {command} --resume with the same arguments continues from the "
            "last checkpoint",
            err=True,
        )
        raise typer.Exit(130) from None


@app.command()
def train(
    sources: Files,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run")] = False,
) -> None:
    """Train a potential, into the folder that the configuration names.

    Ctrl-C leaves a run that --resume continues.

    Example: blips train config.yaml training.epochs=50
    """
    from blips.train.command import train_from_config

    with _resumable("train"):
        result = train_from_config(sources, resume=resume)
    typer.echo(f"best validation loss {result.progress.best_loss:.6g}, run in {result.folder}")


@app.command()
def finetune(
    sources: Files,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run")] = False,
) -> None:
    """Train a released potential further.

    Example: blips finetune finetune.yaml data.train=my.extxyz
    """
    from blips.train.command import train_from_config

    with _resumable("finetune"):
        result = train_from_config(sources, resume=resume, only_released=True)
    typer.echo(f"best validation loss {result.progress.best_loss:.6g}, run in {result.folder}")


@app.command()
def export(
    model: Model,
    output: Annotated[Path, typer.Argument(help="file to write")],
) -> None:
    """Write a fine-tuned potential, its posterior means, as a checkpoint of its own package.

    Example: blips export runs/finetune/best.safetensors finetuned.pth.tar
    """
    from blips.train.command import export_model

    typer.echo(f"{export_model(model, output)} written, for the package that the model is from")
