"""Commands about files: info, validate, template."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from typer import Argument, Option

from blips.cli import shared
from blips.errors import refuse_unknown

if TYPE_CHECKING:
    from pydantic import BaseModel

TEMPLATES = {
    "train": ["data.train=train.extxyz"],
    # Rate, weights and average as chosen on silica for MatterSim: see docs/fine-tuning.md.
    "finetune": [
        "model.backbone=chgnet",
        "model.bayes={prior_dropout: 0.01, bounds: [1e-5, 0.11], initial: 1e-4}",
        "model.bayes.encoder={depth: 4}",
        "data.train=train.extxyz",
        "training={epochs: 30, kl_weight: 3e-5, clip_norm: 0.5, ema_decay: 0.97}",
        "training={loss: huber, energy_per_atom: true, weights: {energy: 0.3}}",
        "training={optimizer: adamw, lr: 2e-4, encoder_lr: 1e-3, schedule: {warmup: 0.05}}",
        "folder=runs/finetune",
    ],
    "active": ["initial.structures=start.extxyz"],
}


@shared.app.command()
def info(
    model: shared.Model,
    everything: Annotated[
        bool, Option("--all", help="also hyperparameters, and which maps are Bayesian")
    ] = False,
    json: shared.Json = False,
) -> None:
    """Show what a model is: architecture, elements, error bars, calibration.

    Example: blips info model.safetensors
    """
    from blips.train.checkpoint import describe, error_bars
    from blips.train.objective import backbone_of
    from blips.train.released import is_released_name, load, provenance

    found = load(model)
    report = getattr(found, "report", None)
    about = describe(found)
    if is_released_name(model):
        about["error_bars_made_from"] = provenance(model)
    if json:
        shared.print_json({**about, "bayesian_maps": report and str(report())})
        return
    backbone = backbone_of(found)
    weights = sum(weight.numel() for weight in backbone.parameters())
    elements = getattr(backbone, "trained_numbers", None)
    known = f"{len(elements)} elements" if elements else "elements unknown"
    typer.echo(f"{type(backbone).__name__}, {weights} weights in {about['dtype']}, {known}")
    typer.echo(f"error bars: {error_bars(found)}")
    if "labels" in about:
        typer.echo(f"trained on labels {about['labels']}")
    if report is not None:
        typer.echo(report() if everything else str(report()).splitlines()[-1])
    if everything:
        shared.print_json(about)


@shared.app.command()
def validate(
    sources: shared.Files,
    active: Annotated[
        bool, Option("--active", help="the configuration of a campaign (blips active)")
    ] = False,
    json: shared.Json = False,
) -> None:
    """Check a configuration and print it with all defaults.

    Example: blips validate config.yaml training.epochs=50
    """
    from blips.active.config import load_campaign
    from blips.config import dump_config, load_config

    config = load_campaign(*sources) if active else load_config(*sources)
    if json:
        shared.print_json(config.model_dump(mode="json"))
    else:
        typer.echo(dump_config(config), nl=False)


@shared.app.command()
def template(
    name: Annotated[
        str, Argument(help="train, finetune (released models) or active (campaigns)")
    ] = "train",
    schema: Annotated[
        bool, Option("--schema", help="the JSON schema of configurations instead")
    ] = False,
) -> None:
    """Print a configuration to start from.

    Example: blips template > config.yaml
    """
    from blips.active.config import load_campaign
    from blips.config import load_config

    refuse_unknown("template", name, TEMPLATES)
    config = (load_campaign if name == "active" else load_config)(*TEMPLATES[name])
    if schema:
        shared.print_json(type(config).model_json_schema())
    else:
        typer.echo("\n".join(_commented(config)))


def _commented(section: "BaseModel", indent: str = "") -> Iterator[str]:
    """Yield lines of YAML, each key with its description in the schema as a comment."""
    import yaml
    from pydantic import BaseModel

    values = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        inner = getattr(section, name)
        if isinstance(inner, BaseModel):
            about = (type(inner).__doc__ or "").splitlines()[0].rstrip(".")
            yield f"{indent}{name}:  # {about}"
            yield from _commented(inner, f"{indent}  ")
        else:
            line = yaml.safe_dump({name: values[name]}, default_flow_style=True, width=1000)
            about = field.description or f"one of {', '.join(map(str, get_args(field.annotation)))}"
            yield f"{indent}{line.strip()[1:-1]:<{32 - len(indent)}}  # {about}"
