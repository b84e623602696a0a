"""Commands that use models: predict, condition, evaluate, calibrate, report."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from blips.cli import shared
from blips.defaults import SAMPLES
from blips.errors import ConfigError
from blips.files import write_json, writing
from blips.progress import progress_shown


@shared.app.command()
def predict(
    model: shared.Model,
    structures: shared.Structures,
    output: shared.Output,
    samples: Annotated[str, Option(help="posterior samples; auto: as many as the std needs")] = str(
        SAMPLES
    ),
    method: Annotated[str, Option(help="auto, conditioned, mc, frozen, onepass or map")] = "auto",
    seed: shared.Seed = 0,
    stress: Annotated[bool, Option("--stress", help="also the stress")] = False,
    resume: shared.Resume = False,
    device: shared.Device = "cpu",
    energy_key: shared.EnergyKey = None,
    forces_key: shared.ForcesKey = None,
    json: shared.Json = False,
) -> None:
    """Predict energies and forces with their uncertainties, into an extxyz file.

    Structures that have labels keep them; what is predicted beside these is predicted_energy,
    predicted_forces. Until all is done, frames are in OUTPUT.part.

    Example: blips predict model.safetensors data.extxyz -o predicted.extxyz
    """
    from blips.cli.predict_file import predict_file, summary_of

    if samples != "auto" and not samples.isdigit():
        raise ConfigError(f"--samples {samples}: expected a whole number or auto")
    potential = shared.load_model(model, device)
    number = samples if samples == "auto" else int(samples)
    options = {"samples": number, "method": method, "seed": seed, "stress": stress}
    labels = shared.labels_of(potential.backbone.labels, energy_key, forces_key)
    with progress_shown():
        done = predict_file(potential, structures, output, resume=resume, labels=labels, **options)
    if json:
        about = {"output": str(output), "structures": done.structures}
        about |= {"method": done.example.method, "samples": done.example.samples}
        shared.print_json(about | summary_of(output))
        return
    typer.echo(f"{done.structures} structures written to {output}")
    if done.kept:
        typer.echo(f"{done.kept} of them were there before")
    if done.labelled:
        typer.echo("labels are kept: the predictions are predicted_energy, predicted_forces")
    words = [f"{done.example.samples} samples"]
    if errors := done.example.details.get("std_relative_error"):
        words.append(f"relative error of std {max(errors.values()):.2f}")
    if reason := done.example.details.get("chosen_because"):
        words.append(reason)
    typer.echo(f"method {done.example.method}, {'; '.join(words)}")


@shared.app.command()
def condition(
    model: shared.Model,
    structures: shared.Structures,
    output: shared.Output,
    valid: Annotated[
        Path | None, Option(help="labelled structures for the scale of the error bars")
    ] = None,
    maps: Annotated[
        list[str] | None, Option(help="readout, all, or patterns of names; repeatable")
    ] = None,
    dimension: Annotated[int | None, Option(help="more weights are sketched")] = None,
    rows: Annotated[int | None, Option(help="force rows of a structure, at most")] = None,
    anew: Annotated[bool, Option("--anew", help="forget structures of an earlier call")] = False,
    align: Annotated[
        bool, Option(help="released models: fit energies per element to --valid")
    ] = True,
    draws: Annotated[
        int | None, Option(help="keep so many draws only: a small file, final")
    ] = None,
    weights: Annotated[Path | None, Option(help="file of a released model's weights")] = None,
    trust: Annotated[bool, Option("--trust", help="let that file run code as it is read")] = False,
    seed: shared.Seed = 0,
    device: shared.Device = "cpu",
    energy_key: shared.EnergyKey = None,
    forces_key: shared.ForcesKey = None,
    json: shared.Json = False,
) -> None:
    """Condition a model's error bars on structures that it was trained on, or is trusted on.

    Geometries are enough, labels are needed in --valid alone. The model's forces stay as they are,
    and its energies, but for a constant for each element of a released model. Called again on the
    result, it adds structures to those that were seen before.

    Example: blips condition model.safetensors train.extxyz --valid valid.extxyz -o out.safetensors
    """
    from blips.train.checkpoint import save
    from blips.train.objective import backbone_of
    from blips.train.references import conditioned
    from blips.train.released import load

    given = {"dimension": dimension, "rows": rows, "maps": maps and (maps if maps[1:] else maps[0])}
    options = {name: value for name, value in given.items() if value is not None}
    chosen = {} if weights is None else {"weights": weights, "trust": trust}
    found = load(model, device, plain=True, **chosen)
    backbone = backbone_of(found)
    labels = shared.labels_of(backbone.labels, energy_key, forces_key)
    atoms = shared.read_known(structures, backbone, labels)
    known = None if valid is None else shared.read_known(valid, backbone, labels)
    options |= {"anew": anew, "shift": align, "seed": seed, "labels": labels}
    with writing(output), progress_shown():
        potential = conditioned(found, atoms, known, **options)
        if draws is not None:
            potential.posterior = potential.conditioned().only_draws(draws)
        save(potential, output)
    if json:
        shared.print_json({"output": str(output), "posterior": potential.conditioned().to_dict()})
        return
    typer.echo(str(potential.posterior))
    if potential.alignment is not None:
        typer.echo(f"{potential.alignment}; they are part of the model")
    typer.echo(f"model in {output}; predict, evaluate, md and report use its error bars")


@shared.app.command()
def evaluate(
    model: shared.Model,
    structures: shared.Structures,
    folder: Annotated[Path, Option(help="for metrics.json and figures")] = Path("evaluation"),
    samples: shared.Samples = SAMPLES,
    seed: shared.Seed = 0,
    bootstrap: shared.Bootstrap = 1000,
    everything: Annotated[bool, Option("--all", help="print every metric")] = False,
    device: shared.Device = "cpu",
    energy_key: shared.EnergyKey = None,
    forces_key: shared.ForcesKey = None,
    json: shared.Json = False,
) -> None:
    """Compare predictions with labels: a verdict in words, metrics.json and figures.

    Example: blips evaluate model.safetensors test.extxyz --folder evaluation
    """
    from rich.console import Console

    from blips.baselines import predict_with
    from blips.train.objective import backbone_of
    from blips.train.released import load
    from blips.uq import assess

    potential = load(model, device)
    backbone = backbone_of(potential)
    labels = shared.labels_of(backbone.labels, energy_key, forces_key)
    atoms = shared.read_known(structures, backbone, labels)
    references = assess.References.of(atoms, labels)
    options = {"samples": samples, "seed": seed, "stress": references.stress is not None}
    with progress_shown():
        prediction = predict_with(potential, atoms, **options)
        result = assess.assess(prediction, references, n_bootstrap=bootstrap)
        name = Path(model).stem
        path = write_json(folder / "metrics.json", {name: result.to_dict()})
        assess.write_figures(folder / "figures", {name: prediction}, references)
    if json:
        shared.print_json({"file": str(path), **result.to_dict()})
        return
    typer.echo(assess.verdict(result))
    zms = result.energy.get("zms")
    far_off = zms is not None and zms.value > 5.0**2  # RMS energy error, std
    if far_off and getattr(potential, "alignment", None) is None:
        typer.echo(
            "Labels and model may have different energies of single atoms: blips condition "
            "--valid fits them to a released model and keeps them with it."
        )
    if everything:
        Console().print(assess.evaluation_table({name: result}))
    more = "" if everything else "; --all prints every metric"
    typer.echo(f"metrics in {path}, figures in {folder / 'figures'}{more}")


@shared.app.command()
def calibrate(
    model: shared.Model,
    structures: shared.Structures,
    output: shared.Output,
    kind: Annotated[str, Option(help="scale or conformal")] = "scale",
    samples: shared.Samples = SAMPLES,
    seed: shared.Seed = 0,
    device: shared.Device = "cpu",
    energy_key: shared.EnergyKey = None,
    forces_key: shared.ForcesKey = None,
    json: shared.Json = False,
) -> None:
    """Fit the error bars to held-out structures and store the calibration with the model.

    Example: blips calibrate model.safetensors valid.extxyz -o calibrated.safetensors
    """
    from blips.train.checkpoint import save
    from blips.uq.assess import calibrate as fit_calibration

    potential = shared.load_model(model, device)
    labels = shared.labels_of(potential.backbone.labels, energy_key, forces_key)
    atoms = shared.read_known(structures, potential.backbone, labels)
    with writing(output), progress_shown():
        options = {"kind": kind, "samples": samples, "seed": seed, "labels": labels}
        say = partial(typer.echo, err=json)  # stdout is for machines then
        found = fit_calibration(potential, atoms, say=say, **options)
        save(potential, output)  # pyright: ignore[reportArgumentType]
    if json:
        fitted = {name: one.to_dict() for name, one in found.items()}
        shared.print_json({"output": str(output), "calibration": fitted})
        return
    typer.echo(f"calibrated model in {output}; its error bars use the calibration from now on")


@shared.app.command()
def report(
    target: Annotated[
        Path,
        Argument(help="a run, a model, a released one's name, a campaign, or what predict wrote"),
    ],
    output: shared.Output = Path("report.html"),
    structures: Annotated[
        list[Path] | None,
        Option(help="structures to predict, instead of the target's own; repeatable"),
    ] = None,
    samples: shared.Samples = SAMPLES,
    seed: shared.Seed = 0,
    bootstrap: shared.Bootstrap = 1000,
    baseline: Annotated[
        Path | None, Option(help="of a campaign: folder of a random one to compare with")
    ] = None,
    energy_key: shared.EnergyKey = None,
    forces_key: shared.ForcesKey = None,
) -> None:
    """Write one HTML file that opens offline: metrics, plots, structures in 3D.

    Example: blips report runs/nh3 -o report.html
    """
    from blips.report import write_report

    with progress_shown():
        labels = shared.labels_of(None, energy_key, forces_key)
        options = {"samples": samples, "seed": seed, "bootstrap": bootstrap, "labels": labels}
        options |= {"structures": structures or (), "baseline": baseline}
        path = write_report(target, output, **options)
    typer.echo(f"report in {path}, {path.stat().st_size / 1e6:.1f} MB")
