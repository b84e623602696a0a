"""Commands that make models: train, finetune, active, export, demo."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from blips.cli.app import Files, Model, Resume, Seed, app, going_on, load_typed_campaign, no_folder


def _train(command: str, sources: list[str], resume: bool, **options: Any) -> None:
    from blips.train.command import train_from_config

    again = f"blips {command} --resume with the same arguments"
    with going_on(f"{again} continues from the last checkpoint"):
        typer.echo(str(train_from_config(sources, resume=resume, **options)))


@app.command()
def train(sources: Files, resume: Resume = False) -> None:
    """Train a potential, into the folder that the configuration names.

    Ctrl-C leaves a run that --resume continues.

    Example: blips train config.yaml training.epochs=50
    """
    _train("train", sources, resume)


@app.command()
def finetune(sources: Files, resume: Resume = False) -> None:
    """Train a released potential further.

    Example: blips finetune finetune.yaml data.train=my.extxyz
    """
    _train("finetune", sources, resume, only_released=True)


@app.command()
def export(
    model: Model,
    output: Annotated[Path, typer.Argument(help="file to write", callback=no_folder)],
) -> None:
    """Write a fine-tuned potential, its posterior means, as a checkpoint of its own package.

    Example: blips export runs/finetune/best.safetensors finetuned.pth.tar
    """
    from blips.train.command import export_model

    typer.echo(f"{export_model(model, output)} written, for the package that the model is from")


@app.command()
def active(
    sources: Files,
    quiet: Annotated[bool, typer.Option("--quiet", help="show nothing while it runs")] = False,
) -> None:
    """Explore, select, label, retrain, until a budget or a target is reached.

    A campaign that was interrupted goes on when it is started again.

    Example: blips active campaign.yaml stop.labels=8
    """
    from blips.active.campaign import run_campaign

    config = load_typed_campaign(sources)
    again = f"the same command goes on: blips active {shlex.join(sources)}"
    with going_on(f"every finished label is safe in {config.folder}, and {again}"):
        summary = run_campaign(config, display=not quiet)
    typer.echo(
        f"{summary['labels']} labels, {summary['quarantined']} set aside; {summary['ended']}; "
        f"everything is in {config.folder}"
    )


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="where everything goes")] = Path("runs/demo"),
    epochs: Annotated[int | None, typer.Option(help="fewer for a quick look")] = None,
    seed: Seed = 0,
) -> None:
    """Train and condition a potential for ammonia, test its error bars near and far, report.

    Example: blips demo --epochs 1 --folder runs/look
    """
    from blips.demo import run_demo

    run_demo(folder, epochs=epochs, seed=seed)
