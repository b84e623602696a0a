"""Commands that use models: predict, condition, evaluate, calibrate, report."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from blips.cli.app import (
    Bootstrap,
    Device,
    EnergyKey,
    ForcesKey,
    Json,
    Model,
    Output,
    Resume,
    Samples,
    Seed,
    Structures,
    Trust,
    Weights,
    app,
    labels_of,
    load_model,
    print_json,
    read_known,
)
from blips.defaults import SAMPLES
from blips.errors import ConfigError
from blips.files import writing
from blips.progress import progress_shown

if TYPE_CHECKING:
    from blips.prediction import Prediction

ANOTHER_REFERENCE = 5.0  # RMS energy error in std beyond which labels are of another reference


@app.command()
def predict(
    model: Model,
    structures: Structures,
    output: Output,
    samples: Annotated[
        str, typer.Option(help="posterior samples; auto: as many as the std needs")
    ] = str(SAMPLES),
    method: Annotated[
        str, typer.Option(help="auto, conditioned, mc, frozen, onepass or map")
    ] = "auto",
    seed: Seed = 0,
    stress: Annotated[bool, typer.Option("--stress", help="also the stress")] = False,
    resume: Resume = False,
    device: Device = "cpu",
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    json: Json = False,
) -> None:
    """Predict energies and forces with their uncertainties, into an extxyz file.

    Structures that have labels keep them; what is predicted beside these is predicted_energy,
    predicted_forces. Until all is done, frames are in OUTPUT.part.

    Example: blips predict model.safetensors data.extxyz -o predicted.extxyz
    """
    from blips.cli.predict_file import predict_file, summary_of

    potential = load_model(model, device)
    number = _number_or_auto(samples)
    options = {"samples": number, "method": method, "seed": seed, "stress": stress}
    labels = labels_of(potential.backbone, energy_key, forces_key)
    with progress_shown():
        done = predict_file(potential, structures, output, resume=resume, labels=labels, **options)
    if json:
        about = {"output": str(output), "structures": done.structures}
        about |= {"method": done.example.method, "samples": done.example.samples}
        print_json(about | summary_of(output))
        return
    typer.echo(f"{done.structures} structures written to {output}")
    if done.kept:
        typer.echo(f"{done.kept} of them were there before")
    if done.labelled:
        typer.echo("labels are kept: the predictions are predicted_energy, predicted_forces")
    typer.echo(f"method {done.example.method}, {_how(done.example)}")


def _number_or_auto(samples: str) -> Literal["auto"] | int:
    if samples == "auto":
        return "auto"
    if not samples.isdigit():
        raise ConfigError(f"--samples {samples}: expected a whole number or auto")
    return int(samples)


def _how(prediction: "Prediction") -> str:
    """Describe the number of samples, their error and the reason for the method, if any."""
    words = [f"{prediction.samples} samples"]
    if errors := prediction.details.get("std_relative_error"):
        words.append(f"relative error of std {max(errors.values()):.2f}")
    if reason := prediction.details.get("chosen_because"):
        words.append(reason)
    return "; ".join(words)


@app.command()
def condition(
    model: Model,
    structures: Structures,
    output: Output,
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
    weights: Weights = None,
    trust: Trust = False,
    seed: Seed = 0,
    device: Device = "cpu",
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    json: Json = False,
) -> None:
    """Condition a model's error bars on structures that it was trained on, or is trusted on.

    Geometries are enough, labels are needed in --valid alone. The model's forces stay as they are,
    and its energies, but for a constant for each element of a released model. Called again on the
    result, it adds structures to those that were seen before.

    Example: blips condition model.safetensors train.extxyz --valid valid.extxyz -o out.safetensors
    """
    from blips.train.checkpoint import backbone_of, save
    from blips.train.command import conditioned, plain_or_saved

    given = {"dimension": dimension, "rows": rows, "maps": maps and (maps if maps[1:] else maps[0])}
    options = {name: value for name, value in given.items() if value is not None}
    found = plain_or_saved(model, weights, trust, device)
    backbone = backbone_of(found)
    labels = labels_of(backbone, energy_key, forces_key)
    atoms = read_known(structures, backbone, labels)
    known = None if valid is None else read_known(valid, backbone, labels)
    options |= {"anew": anew, "align": align, "seed": seed, "labels": labels}
    with writing(output), progress_shown():
        potential = conditioned(found, atoms, known, **options)
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
    bootstrap: Bootstrap = 1000,
    everything: Annotated[bool, typer.Option("--all", help="print every metric")] = False,
    device: Device = "cpu",
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    json: Json = False,
) -> None:
    """Compare predictions with labels: a verdict in words, metrics.json and figures.

    Example: blips evaluate model.safetensors test.extxyz --folder evaluation
    """
    from rich.console import Console

    from blips.baselines import predict_with
    from blips.train.checkpoint import backbone_of
    from blips.train.released import load
    from blips.uq.assess import (
        References,
        assess,
        evaluation_table,
        stress_too,
        verdict,
        write_evaluation,
        write_figures,
    )

    potential = load(model, device)
    backbone = backbone_of(potential)
    labels = labels_of(backbone, energy_key, forces_key)
    atoms = read_known(structures, backbone, labels)
    references = References.of(atoms, labels)
    stress = stress_too(atoms, references)
    with progress_shown():
        prediction = predict_with(potential, atoms, samples=samples, seed=seed, stress=stress)
        result = assess(prediction, references, n_bootstrap=bootstrap)
        name = Path(model).stem
        path = write_evaluation(folder / "metrics.json", {name: result})
        write_figures(folder / "figures", {name: prediction}, references)
    if json:
        print_json({"file": str(path), **result.to_dict()})
        return
    typer.echo(verdict(result))
    zms = result.energy.get("zms")
    far_off = zms is not None and zms.value > ANOTHER_REFERENCE**2
    if far_off and getattr(potential, "alignment", None) is None:
        typer.echo(
            "Labels and model may have different energies of single atoms: blips condition "
            "--valid fits them to a released model and keeps them with it."
        )
    if everything:
        Console().print(evaluation_table({name: result}))
    more = "" if everything else "; --all prints every metric"
    typer.echo(f"metrics in {path}, figures in {folder / 'figures'}{more}")


@app.command()
def calibrate(
    model: Model,
    structures: Structures,
    output: Output,
    kind: Annotated[str, typer.Option(help="scale or conformal")] = "scale",
    samples: Samples = SAMPLES,
    seed: Seed = 0,
    device: Device = "cpu",
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    json: Json = False,
) -> None:
    """Fit the error bars to held-out structures and store the calibration with the model.

    Example: blips calibrate model.safetensors valid.extxyz -o calibrated.safetensors
    """
    from blips.train.checkpoint import save
    from blips.uq.assess import calibrate as fit_calibration

    potential = load_model(model, device)
    labels = labels_of(potential.backbone, energy_key, forces_key)
    atoms = read_known(structures, potential.backbone, labels)
    with writing(output), progress_shown():
        options = {"kind": kind, "samples": samples, "seed": seed, "labels": labels}
        say = partial(typer.echo, err=json)  # stdout is for machines then
        found = fit_calibration(potential, atoms, say=say, **options)
        save(potential, output)  # pyright: ignore[reportArgumentType]
    if json:
        fitted = {name: one.to_dict() for name, one in found.items()}
        print_json({"output": str(output), "calibration": fitted})
        return
    typer.echo(f"calibrated model in {output}; its error bars use the calibration from now on")


@app.command()
def report(
    target: Annotated[
        Path,
        typer.Argument(
            help="a run, a model, a released one's name, a campaign, or what predict wrote"
        ),
    ],
    output: Output = Path("report.html"),
    structures: Annotated[
        list[Path] | None,
        typer.Option(help="structures to predict, instead of the target's own; repeatable"),
    ] = None,
    samples: Samples = SAMPLES,
    seed: Seed = 0,
    bootstrap: Bootstrap = 1000,
    baseline: Annotated[
        Path | None, typer.Option(help="of a campaign: folder of a random one to compare with")
    ] = None,
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
) -> None:
    """Write one HTML file that opens offline: metrics, plots, structures in 3D.

    Example: blips report runs/nh3 -o report.html
    """
    from blips.report import write_report

    with progress_shown():
        labels = labels_of(None, energy_key, forces_key)
        options = {"samples": samples, "seed": seed, "bootstrap": bootstrap, "labels": labels}
        options |= {"structures": structures or (), "baseline": baseline}
        path = write_report(target, output, **options)
    typer.echo(f"report in {path}, {path.stat().st_size / 1e6:.1f} MB")
