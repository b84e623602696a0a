"""The `blips` command. Heavy imports are inside the commands, so that help is quick."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blips.errors import BlipsError, ConfigError

if TYPE_CHECKING:
    from blips.potential import BayesianPotential

app = typer.Typer(
    name="blips",
    help="Error bars for any interatomic potential.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Files = Annotated[list[str], typer.Argument(help="config files and a.b=value, left to right")]
Model = Annotated[Path, typer.Argument(help="a model written by blips (.safetensors)")]
Structures = Annotated[Path, typer.Argument(help="structures, any file that ASE reads")]
Samples = Annotated[int, typer.Option(help="posterior samples")]
Seed = Annotated[int, typer.Option(help="the same seed gives the same result")]


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


@app.command()
def predict(
    model: Model,
    structures: Structures,
    output: Annotated[Path, typer.Option("--output", "-o", help="extxyz file to write")],
    samples: Samples = 32,
    method: Annotated[str, typer.Option(help="mc, frozen or map")] = "mc",
    seed: Seed = 0,
    stress: Annotated[bool, typer.Option("--stress", help="also the stress")] = False,
) -> None:
    """Predict energies and forces with their uncertainties, into an extxyz file."""
    from blips.data.structures import check_structures, read_structures, write_predictions

    atoms = read_structures(structures)
    check_structures(atoms, structures)
    potential = _load_bayesian(model)
    prediction = potential.predict(atoms, samples=samples, method=method, seed=seed, stress=stress)
    write_predictions(output, atoms, prediction)
    typer.echo(f"{len(atoms)} structures written to {output}")


@app.command()
def evaluate(
    model: Model,
    structures: Structures,
    folder: Annotated[Path, typer.Option(help="for metrics.json and figures")] = Path("evaluation"),
    samples: Samples = 32,
    seed: Seed = 0,
    bootstrap: Annotated[int, typer.Option(help="resamples for the intervals")] = 1000,
) -> None:
    """Compare predictions with labels: a table, metrics.json and figures."""
    from rich.console import Console

    from blips.data.structures import check_structures, read_structures
    from blips.uq.report import References, assess, write_evaluation, write_figures
    from blips.uq.tables import evaluation_table

    atoms = read_structures(structures)
    check_structures(atoms, structures)
    references = References.of(atoms)
    potential = _load_bayesian(model)
    prediction = potential.predict(atoms, samples=samples, seed=seed)
    result = assess(prediction, references, n_bootstrap=bootstrap)
    Console().print(evaluation_table({model.stem: result}))
    path = write_evaluation(folder / "metrics.json", {model.stem: result})
    write_figures(folder / "figures", {model.stem: prediction}, references)
    typer.echo(f"metrics in {path}, figures in {folder / 'figures'}")


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="a model of blips, or the name of a released one")],
    structures: Structures,
    output: Annotated[Path, typer.Option("--output", "-o", help="calibrated model to write")],
    kind: Annotated[str, typer.Option(help="scale, isotonic or conformal")] = "scale",
    samples: Samples = 64,
    seed: Seed = 0,
    epochs: Annotated[int, typer.Option(help="for models without posterior")] = 30,
    align: Annotated[
        bool, typer.Option(help="for these: energies up to a constant for each element")
    ] = True,
    weights: Annotated[Path | None, typer.Option(help="of a released model")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="let the weights run code")] = False,
) -> None:
    """Fit the error bars to held-out structures and store the calibration with the model.

    A released model (chgnet, ...) and any other without posterior first gets one: an inference
    network is fitted to part of the structures, and the model itself is left as it is.
    """
    from blips.data.structures import check_structures, read_structures
    from blips.train.checkpoint import save
    from blips.train.command import calibrated

    atoms = read_structures(structures)
    check_structures(atoms, structures)
    potential = calibrated(
        model,
        atoms,
        weights=weights,
        trust=trust,
        kind=kind,
        samples=samples,
        seed=seed,
        epochs=epochs,
        align=align,
    )
    save(potential, output)
    for quantity, calibrator in potential.calibration.items():
        typer.echo(f"{quantity}: {calibrator.to_dict()}")
    typer.echo(f"calibrated model in {output}")


@app.command()
def reproduce(
    study: Annotated[str, typer.Argument(help="nbody or ammonia")],
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

    outcome = reproduce(study, profile, workers=workers, only=only or (), folder=folder, runs=runs)
    if outcome.failed:
        raise typer.Exit(1)


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
    name: Annotated[str, typer.Argument(help="train, or finetune for released models")] = "train",
) -> None:
    """Print a configuration to start from: blips template > config.yaml."""
    from blips.config import dump_config
    from blips.train.templates import template

    typer.echo(dump_config(template(name)), nl=False)


def _load_bayesian(path: Path) -> "BayesianPotential":
    from blips.potential import BayesianPotential
    from blips.train.checkpoint import load

    model = load(path)
    if not isinstance(model, BayesianPotential):
        raise ConfigError(
            f"{path} holds a plain {type(model).__name__} without posterior, which has no error "
            "bars; train with model.bayes.enabled=true"
        )
    return model


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
