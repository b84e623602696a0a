"""Commands about files: info, validate, template."""

from typing import Annotated

import typer

from blips.cli.app import Files, Model, app


@app.command()
def info(model: Model) -> None:
    """What a model file holds: architecture, posterior, calibration."""
    import json

    from blips.train.checkpoint import load, read_tensors

    _, header = read_tensors(model)
    typer.echo(json.dumps(header.get("model"), indent=1))
    potential = load(model)
    report = getattr(potential, "report", None)
    if report is not None:
        typer.echo(report())


@app.command()
def validate(sources: Files) -> None:
    """Check a configuration and print it with all defaults."""
    from blips.config import dump_config, load_config

    typer.echo(dump_config(load_config(*sources)), nl=False)


@app.command()
def template(
    name: Annotated[
        str, typer.Argument(help="train, finetune (released models) or active")
    ] = "train",
) -> None:
    """Print a configuration to start from: blips template > config.yaml."""
    from blips.active.config import load_campaign
    from blips.config import dump_config

    if name == "active":
        config = load_campaign({"initial": {"structures": "start.extxyz"}})
        typer.echo(dump_config(config), nl=False)
        return
    from blips.train.templates import template

    typer.echo(dump_config(template(name)), nl=False)
