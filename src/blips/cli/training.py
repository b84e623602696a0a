"""Commands that make models: train, finetune, active, export, demo."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from blips.cli import shared
from blips.errors import ConfigError


def _train(command: str, sources: list[str], resume: bool) -> None:
    from blips.backbones import RELEASED
    from blips.config import load_config
    from blips.train.fit import fit
    from blips.train.released import build_model, is_released

    again = f"blips {command} --resume with the same arguments"
    with shared.going_on(f"{again} continues from the last checkpoint"):
        config = load_config(*sources)
        if command == "finetune" and not is_released(config.model):
            asked = config.model.backbone + " with pretrained=false" * (not config.model.pretrained)
            raise ConfigError(
                f"fine-tuning starts from released weights, and {asked} has none; set "
                f"model.backbone to one of {', '.join(sorted(RELEASED))}, or use blips train"
            )
        model = build_model(config.model, config.seed)
        typer.echo(str(fit(model, config=config, resume=resume)))


@shared.app.command()
def train(sources: shared.Files, resume: shared.Resume = False) -> None:
    """Train a potential, into the folder that the configuration names.

    Ctrl-C leaves a run that --resume continues.

    Example: blips train config.yaml training.epochs=50
    """
    _train("train", sources, resume)


@shared.app.command()
def finetune(sources: shared.Files, resume: shared.Resume = False) -> None:
    """Train a released potential further.

    Example: blips finetune finetune.yaml data.train=my.extxyz
    """
    _train("finetune", sources, resume)


@shared.app.command()
def export(
    model: shared.Model,
    output: Annotated[Path, Argument(help="file to write", callback=shared.no_folder)],
) -> None:
    """Write a fine-tuned potential, its posterior means, as a checkpoint of its own package.

    Example: blips export runs/finetune/best.safetensors finetuned.pth.tar
    """
    from blips.backbones.foreign import ForeignBackbone
    from blips.potential import BayesianPotential
    from blips.train.objective import backbone_of
    from blips.train.released import load

    found = load(model)
    backbone = backbone_of(found.to_base() if isinstance(found, BayesianPotential) else found)
    if not isinstance(backbone, ForeignBackbone):
        raise ConfigError(
            f"{model} holds a {type(backbone).__name__}, which is blips' own and has no other "
            "format; blips.save(potential.to_base(), file) writes the plain model"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    typer.echo(f"{backbone.export(output)} written, for the package that the model is from")


@shared.app.command()
def active(
    sources: shared.Files,
    quiet: Annotated[bool, Option("--quiet", help="show nothing while it runs")] = False,
) -> None:
    """Explore, select, label, retrain, until a budget or a target is reached.

    A campaign that was interrupted goes on when it is started again.

    Example: blips active campaign.yaml stop.labels=8
    """
    from blips.active import load_campaign, run_campaign

    config = load_campaign(*sources)
    again = f"the same command goes on: blips active {shlex.join(sources)}"
    with shared.going_on(f"every finished label is safe in {config.folder}, and {again}"):
        summary = run_campaign(config, display=not quiet)
    typer.echo(
        f"{summary['labels']} labels, {summary['quarantined']} set aside; {summary['ended']}; "
        f"everything is in {config.folder}"
    )


@shared.app.command()
def demo(
    folder: Annotated[Path, Option(help="where everything goes")] = Path("runs/demo"),
    epochs: Annotated[int | None, Option(help="fewer for a quick look")] = None,
    seed: shared.Seed = 0,
) -> None:
    """Train and condition a potential for ammonia, test its error bars near and far, report.

    Example: blips demo --epochs 1 --folder runs/look
    """
    from blips.demo import run_demo

    run_demo(folder, epochs=epochs, seed=seed)
