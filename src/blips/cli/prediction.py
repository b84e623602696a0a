"""Commands that use models: predict, evaluate, calibrate."""

from pathlib import Path
from typing import Annotated

import typer

from blips.cli.app import (
    Json,
    Model,
    Samples,
    Seed,
    Structures,
    app,
    load_bayesian,
    messages_aside,
    print_json,
    read_known,
)


@app.command()
def predict(
    model: Model,
    structures: Structures,
    output: Annotated[Path, typer.Option("--output", "-o", help="extxyz file to write")],
    samples: Samples = 32,
    method: Annotated[str, typer.Option(help="mc, frozen or map")] = "mc",
    seed: Seed = 0,
    stress: Annotated[bool, typer.Option("--stress", help="also the stress")] = False,
    json: Json = False,
) -> None:
    """Predict energies and forces with their uncertainties, into an extxyz file.

    Example: blips predict model.safetensors data.extxyz -o predicted.extxyz
    """
    from blips.data.structures import write_predictions

    potential = load_bayesian(model)
    atoms = read_known(structures, potential)
    prediction = potential.predict(atoms, samples=samples, method=method, seed=seed, stress=stress)
    write_predictions(output, atoms, prediction)
    if json:
        print_json({"output": str(output), **prediction.summary()})
        return
    typer.echo(f"{len(atoms)} structures written to {output}")


@app.command()
def evaluate(
    model: Model,
    structures: Structures,
    folder: Annotated[Path, typer.Option(help="for metrics.json and figures")] = Path("evaluation"),
    samples: Samples = 32,
    seed: Seed = 0,
    bootstrap: Annotated[int, typer.Option(help="resamples for the intervals")] = 1000,
    json: Json = False,
) -> None:
    """Compare predictions with labels: a table, metrics.json and figures.

    Example: blips evaluate model.safetensors test.extxyz --folder evaluation
    """
    from rich.console import Console

    from blips.uq.report import References, assess, write_evaluation, write_figures
    from blips.uq.tables import evaluation_table

    potential = load_bayesian(model)
    atoms = read_known(structures, potential)
    references = References.of(atoms)
    prediction = potential.predict(atoms, samples=samples, seed=seed)
    result = assess(prediction, references, n_bootstrap=bootstrap)
    if not json:
        Console().print(evaluation_table({model.stem: result}))
    path = write_evaluation(folder / "metrics.json", {model.stem: result})
    write_figures(folder / "figures", {model.stem: prediction}, references)
    if json:
        print_json({"file": str(path), **result.to_dict()})
        return
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
    json: Json = False,
) -> None:
    """Fit the error bars to held-out structures and store the calibration with the model.

    A released model (chgnet, ...) and any other without posterior first gets one: an inference
    network is fitted to part of the structures, and the model itself is left as it is.

    Example: blips calibrate model.safetensors valid.extxyz -o calibrated.safetensors
    """
    from blips.data.structures import check_structures, read_structures
    from blips.train.checkpoint import save
    from blips.train.command import calibrated

    atoms = read_structures(structures)
    check_structures(atoms, structures)
    with messages_aside(json):
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
    if json:
        found = {name: one.to_dict() for name, one in potential.calibration.items()}
        print_json({"output": str(output), "calibration": found})
        return
    for quantity, calibrator in potential.calibration.items():
        typer.echo(f"{quantity}: {calibrator.to_dict()}")
    typer.echo(f"calibrated model in {output}")
