"""Commands that use models: predict, condition, evaluate, calibrate."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from blips.cli.app import (
    Json,
    Model,
    Samples,
    Seed,
    Structures,
    app,
    load_model,
    messages_aside,
    print_json,
    read_known,
)
from blips.defaults import SAMPLES
from blips.errors import ConfigError

if TYPE_CHECKING:
    from blips.prediction import Prediction


@app.command()
def predict(
    model: Model,
    structures: Structures,
    output: Annotated[Path, typer.Option("--output", "-o", help="extxyz file to write")],
    samples: Annotated[
        str, typer.Option(help="posterior samples; auto: as many as the tolerance needs")
    ] = str(SAMPLES),
    method: Annotated[
        str, typer.Option(help="auto, conditioned, mc, frozen, onepass or map")
    ] = "auto",
    seed: Seed = 0,
    stress: Annotated[bool, typer.Option("--stress", help="also the stress")] = False,
    tolerance: Annotated[
        float, typer.Option(help="of --samples auto: relative error of the deviations")
    ] = 0.1,
    json: Json = False,
) -> None:
    """Predict energies and forces with their uncertainties, into an extxyz file.

    Example: blips predict model.safetensors data.extxyz -o predicted.extxyz
    """
    from blips.data.structures import write_structures

    potential = load_model(model)
    atoms = read_known(structures, potential)
    options = {"tolerance": tolerance} if samples == "auto" else {}
    prediction = potential.predict(
        atoms, samples=_number_or_auto(samples), method=method, seed=seed, stress=stress, **options
    )
    write_structures(output, prediction.to_atoms(atoms))
    if json:
        print_json({"output": str(output), **prediction.summary()})
        return
    typer.echo(f"{len(atoms)} structures written to {output}")
    typer.echo(f"method {prediction.method}, {_how(prediction)}")


def _number_or_auto(samples: str) -> Literal["auto"] | int:
    if samples == "auto":
        return "auto"
    if not samples.isdigit():
        raise ConfigError(f"--samples {samples}: expected a whole number or auto")
    return int(samples)


def _how(prediction: "Prediction") -> str:
    """Number of samples, their error and the reason for the method, where there are such."""
    words = [f"{prediction.samples} samples"]
    if errors := prediction.details.get("std_relative_error"):
        words.append(f"relative error of std {max(errors.values()):.2f}")
    if reason := prediction.details.get("chosen_because"):
        words.append(reason)
    return "; ".join(words)


@app.command()
def condition(
    model: Annotated[str, typer.Argument(help="a model of blips, or the name of a released one")],
    structures: Structures,
    output: Annotated[Path, typer.Option("--output", "-o", help="model to write")],
    valid: Annotated[
        Path | None, typer.Option(help="labelled structures for the scale of the error bars")
    ] = None,
    maps: Annotated[
        list[str] | None, typer.Option(help="readout, all, or patterns of names; repeatable")
    ] = None,
    dimension: Annotated[int | None, typer.Option(help="more weights are sketched")] = None,
    rows: Annotated[int | None, typer.Option(help="force rows of a structure, at most")] = None,
    anew: Annotated[
        bool, typer.Option("--anew", help="forget structures of an earlier call")
    ] = False,
    align: Annotated[
        bool, typer.Option(help="released models: fit energies per element to --valid")
    ] = True,
    draws: Annotated[
        int | None, typer.Option(help="keep so many draws only: a small file, final")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="of a released model")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="let the weights run code")] = False,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Condition a model's error bars on structures that it was trained on, or is trusted on.

    Geometries are enough, labels are needed in --valid alone. The model's forces stay as they are,
    and its energies, but for a constant for each element of a released model. Called again on the
    result, it adds structures to those that were seen before.

    Example: blips condition model.safetensors train.extxyz --valid valid.extxyz -o out.safetensors
    """
    from blips.data.structures import check_structures, read_structures
    from blips.files import writing
    from blips.train.checkpoint import save
    from blips.train.command import conditioned

    given = {"dimension": dimension, "rows": rows, "maps": maps and (maps if maps[1:] else maps[0])}
    options = {name: value for name, value in given.items() if value is not None}
    known = None if valid is None else check_structures(read_structures(valid), valid)
    atoms = check_structures(read_structures(structures), structures)
    with writing(output), messages_aside(json):
        potential = conditioned(
            model,
            atoms,
            known,
            anew=anew,
            align=align,
            weights=weights,
            trust=trust,
            seed=seed,
            **options,
        )
        if draws is not None:
            potential.posterior = potential.conditioned().only_draws(draws)
        save(potential, output)
    if json:
        print_json({"output": str(output), "posterior": potential.conditioned().to_dict()})
        return
    typer.echo(str(potential.posterior))
    if potential.alignment is not None:
        typer.echo(f"{potential.alignment}; they are part of the model")
    typer.echo(f"model in {output}; predict, evaluate, md and report use its error bars")


@app.command()
def evaluate(
    model: Model,
    structures: Structures,
    folder: Annotated[Path, typer.Option(help="for metrics.json and figures")] = Path("evaluation"),
    samples: Samples = SAMPLES,
    seed: Seed = 0,
    bootstrap: Annotated[int, typer.Option(help="resamples for the intervals")] = 1000,
    everything: Annotated[bool, typer.Option("--all", help="print every metric")] = False,
    json: Json = False,
) -> None:
    """Compare predictions with labels: a verdict in words, metrics.json and figures.

    Example: blips evaluate model.safetensors test.extxyz --folder evaluation
    """
    from rich.console import Console

    from blips.uq.assess import (
        References,
        assess,
        evaluation_table,
        stress_too,
        verdict,
        write_evaluation,
        write_figures,
    )

    potential = load_model(model)
    atoms = read_known(structures, potential)
    references = References.of(atoms)
    options = stress_too(atoms, references)
    prediction = potential.predict(atoms, samples=samples, seed=seed, **options)
    result = assess(prediction, references, n_bootstrap=bootstrap)
    if not json:
        typer.echo(verdict(result))
    if everything and not json:
        Console().print(evaluation_table({model.stem: result}))
    path = write_evaluation(folder / "metrics.json", {model.stem: result})
    write_figures(folder / "figures", {model.stem: prediction}, references)
    if json:
        print_json({"file": str(path), **result.to_dict()})
        return
    more = "" if everything else "; --all prints every metric"
    typer.echo(f"metrics in {path}, figures in {folder / 'figures'}{more}")


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="a model of blips, or the name of a released one")],
    structures: Structures,
    output: Annotated[Path, typer.Option("--output", "-o", help="calibrated model to write")],
    kind: Annotated[str, typer.Option(help="scale, isotonic or conformal")] = "scale",
    samples: Samples = SAMPLES,
    seed: Seed = 0,
    epochs: Annotated[int, typer.Option(help="for models without posterior")] = 30,
    align: Annotated[
        bool, typer.Option(help="for these: fit energies per element, and keep them")
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
    from blips.files import writing
    from blips.train.checkpoint import save
    from blips.train.command import calibrated

    atoms = read_structures(structures)
    check_structures(atoms, structures)
    with writing(output), messages_aside(json):
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
            say=None if json else typer.echo,
        )
        save(potential, output)
    if json:
        found = {name: one.to_dict() for name, one in potential.calibration.items()}
        print_json({"output": str(output), "calibration": found})
        return
    if potential.alignment is not None:
        typer.echo(f"{potential.alignment}; they are part of the model")
    typer.echo(f"calibrated model in {output}; its error bars use the calibration from now on")
