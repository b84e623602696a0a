"""Measure the error bars of metatrain's LLPR on acetylacetone, with the metrics of `blips.uq`.

    python -m studies.errorbars.metatrain_llpr --seeds 0 1 2 --output FILE

Metatrain is no dependency: it runs in an environment of its own, made once by

    python3 -m venv .venv-metatrain
    echo "torch==2.13.0" > torch.txt
    .venv-metatrain/bin/pip install -c torch.txt torch
    .venv-metatrain/bin/pip install -c torch.txt "metatrain[soap-bpnn]==2026.4.1"

(torch first, a build for processors alone if there is one: others come with gigabytes of CUDA).

For every seed, on one thread: train SOAP-BPNN on energies and forces with the package's defaults
but for the number of epochs, wrap it with `llpr`, calibrated on the validation set, and predict
the test sets. The validation set also picks the best epoch. The data are in $BLIPS_DATA/acac:

| set | structures |
|---|---|
| train | the first 100 of train_300K.xyz |
| validation | the last 50 of train_300K.xyz |
| 300 K, near | 300 of test_MD_300K.xyz, those of the study errorbars |
| 600 K, far | 300 of test_MD_600K.xyz, likewise |

Sigma of an energy is the output `energy_uncertainty` of a whole structure: a standard deviation of
the total energy, in eV. The package has none for forces: theirs is the spread of the forces of its
last-layer ensemble, `energy_ensemble`, each member differentiated.

An exported SOAP-BPNN has wrong forces, without a word, unless `sphericart.torch` was imported
before (sphericart-torch 2.0.4 registers its derivatives in Python); `mtt eval` does not do so. This
script does, and compares forces with differences of energies.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
from ase import Atoms

SETS = {"300 K": "test_MD_300K.xyz", "600 K": "test_MD_600K.xyz"}
PACKAGES = ("metatrain", "metatomic-torch", "metatomic-ase", "metatensor-torch", "torch", "ase")
BATCH = 50  # structures of a prediction
METRICS = (
    ("energy", "mae", "energy: MAE", 1e3, "meV"),
    ("energy", "rms_std", "energy: RMS sigma", 1e3, "meV"),
    ("energy", "coverage_68", "energy: inside 68 %", 100, "%"),
    ("energy", "coverage_90", "energy: inside 90 %", 100, "%"),
    ("energy", "spearman", "energy: Spearman's rho", 1, ""),
    ("energy", "nll", "energy: NLL", 1, "nats, eV"),
    ("energy", "crps", "energy: CRPS", 1e3, "meV"),
    ("forces", "mae", "forces: MAE", 1e3, "meV/A"),
    ("forces", "rms_std", "forces: RMS sigma", 1e3, "meV/A"),
    ("forces", "coverage_68", "forces: inside 68 %", 100, "%"),
    ("forces", "coverage_90", "forces: inside 90 %", 100, "%"),
    ("forces_per_atom", "spearman", "forces: Spearman's rho, atoms", 1, ""),
    ("forces_per_structure", "spearman", "forces: Spearman's rho, structures", 1, ""),
    ("forces", "nll_component", "forces: NLL of a component", 1, "nats, eV/A"),
    ("forces", "crps", "forces: CRPS", 1e3, "meV/A"),
)


# -------------------------------------------------------------------- in metatrain's environment
def predict(model: Path, structures: Path, output: Path) -> None:
    """Predict a file's structures with an exported model, and write arrays."""
    import sphericart.torch  # type: ignore[import-not-found]  # noqa: F401
    import torch
    from metatomic.torch import ModelOutput  # type: ignore[import-not-found]
    from metatomic_ase import MetatomicCalculator  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    folder = str(model.parent / "extensions")
    calculator = MetatomicCalculator(model, extensions_directory=folder, device="cpu")
    names = ("energy", "energy_uncertainty", "energy_ensemble")
    wanted = {name: ModelOutput(unit="eV", sample_kind="system") for name in names}
    wanted["energy_ensemble"].explicit_gradients = ["positions"]
    frames, rows, begun = read(structures), [], time.perf_counter()
    for start in range(0, len(frames), BATCH):
        found = calculator.run_model(frames[start : start + BATCH], wanted)
        energy, std, members = (found[name].block() for name in names)
        gradients = members.gradient("positions").values.detach().double()  # [N, 3, members]
        values = members.values.detach().double()  # [S, members]
        rows.append(
            {
                "energy": energy.values.detach().double().squeeze(1),
                "energy_std": std.values.detach().double().squeeze(1),
                "ensemble_std": values.std(dim=1),
                "forces": -gradients.mean(dim=2),  # the ensemble is centred on the model
                "forces_std": gradients.std(dim=2),
            }
        )
    arrays = {name: np.concatenate([row[name].numpy() for row in rows]) for name in rows[0]}
    first = frames[:BATCH]
    check_forces(calculator, first, arrays["forces"][: sum(map(len, first))])
    arrays["seconds"] = np.array(time.perf_counter() - begun)
    arrays["versions"] = np.array(json.dumps({name: version(name) for name in PACKAGES}))
    np.savez(output, allow_pickle=False, **arrays)


def check_forces(calculator: Any, frames: list[Atoms], forces: np.ndarray) -> None:
    """Compare forces with slopes of the energy, one random direction a structure."""
    from metatomic.torch import ModelOutput  # type: ignore[import-not-found]

    rng, step, ends = np.random.default_rng(0), 0.02, []
    ways = [rng.normal(size=frame.positions.shape) for frame in frames]
    ways = [way / np.linalg.norm(way) for way in ways]
    wanted = {"energy": ModelOutput(unit="eV", sample_kind="system")}
    for shift in (step, -step):
        moved = [frame.copy() for frame in frames]
        for atoms, way in zip(moved, ways, strict=True):
            atoms.positions += shift * way
        found = calculator.run_model(moved, wanted)["energy"].block().values
        ends.append(found.detach().double().flatten().numpy())
    slopes = (ends[1] - ends[0]) / (2 * step)
    each = np.split(forces, np.cumsum([len(frame) for frame in frames])[:-1])
    error = slopes - [np.sum(f * way) for f, way in zip(each, ways, strict=True)]
    if np.std(error) > 0.1 * np.std(slopes):
        raise SystemExit(f"forces are no slopes: {np.std(error):.3f} off of {np.std(slopes):.3f}")


# --------------------------------------------------------------------------- in this environment
def read(path: Path, chosen: str = ":") -> list[Atoms]:
    """Read structures of a file."""
    frames = ase.io.read(path, chosen)
    return frames if isinstance(frames, list) else [frames]


def training_options(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return metatrain's options of training; it reads JSON as the YAML that it is."""
    energy = {"key": "energy", "unit": "eV", "forces": {"key": "forces"}}
    targets = {"energy": {**energy, "stress": False, "virial": False}}
    return {
        "seed": seed,
        "device": "cpu",
        "base_precision": arguments.precision,
        "architecture": {
            "name": "soap_bpnn",
            "training": {"num_epochs": arguments.epochs, "num_workers": 0},
        },
        **{
            f"{name}_set": {
                "systems": {"read_from": f"{name}.xyz", "length_unit": "angstrom"},
                "targets": targets,
            }
            for name in ("training", "validation")
        },
    }


def llpr_options(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return metatrain's options of the LLPR wrapper."""
    architecture = {
        "name": "llpr",
        "model": {"num_ensemble_members": {"energy": arguments.members}},
        "training": {"model_checkpoint": "model.ckpt", "num_workers": 0},
    }
    return {**training_options(arguments, seed), "architecture": architecture}


def run(command: list[str], folder: Path, log: str) -> float:
    """Run a command on one thread in a folder; seconds of the clock, its last lines if it fails."""
    begun = time.perf_counter()
    with (folder / log).open("w") as file:
        code = subprocess.run(
            command,
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ).returncode
    if code:
        raise SystemExit((folder / log).read_text()[-2000:])
    return time.perf_counter() - begun


def processor_seconds() -> float:
    """Return the processor time of all finished commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def train(arguments: argparse.Namespace, seed: int, folder: Path) -> None:
    """Train and wrap in a folder, unless that is done."""
    if (folder / "seconds.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    source = arguments.data / "acac" / "train_300K.xyz"
    ase.io.write(folder / "training.xyz", read(source, ":100"), format="extxyz")
    ase.io.write(folder / "validation.xyz", read(source, "-50:"), format="extxyz")
    seconds, before = {}, processor_seconds()
    stages = {"model": training_options(arguments, seed), "llpr": llpr_options(arguments, seed)}
    for name, options in stages.items():
        (folder / f"{name}.yaml").write_text(json.dumps(options, indent=1))
        command = [str(arguments.mtt.absolute()), "train", f"{name}.yaml", "-o", f"{name}.pt"]
        seconds[name] = run(command, folder, f"{name}.log")
    seconds["processor"] = processor_seconds() - before
    (folder / "seconds.json").write_text(json.dumps(seconds))


def predictions(arguments: argparse.Namespace, folder: Path, file: str) -> dict[str, Any]:
    """Predict a test set by metatrain's own interpreter, unless that is done."""
    output = folder / file.replace(".xyz", ".npz")
    if not output.exists():
        paths = (folder / "llpr.pt", (arguments.data / "acac" / file).absolute(), output)
        python = arguments.mtt.absolute().parent / "python"
        script = Path(__file__).absolute()
        run([str(python), str(script), "--predict", *map(str, paths)], folder, f"{file}.log")
    with np.load(output) as found:
        return {name: found[name] for name in found.files}


def scores(frames: list[Atoms], found: dict[str, Any]) -> dict[str, Any]:
    """Score predictions of labelled structures."""
    from blips.prediction import Prediction
    from blips.uq.assess import References, assess

    names = ("energy", "energy_std", "forces", "forces_std")
    prediction = Prediction.of(
        {name: np.asarray(found[name]) for name in names},
        n_atoms=np.array([len(frame) for frame in frames]),
        method="llpr",
        samples=0,
    )
    tables = assess(prediction, References.of(frames)).to_dict()
    chosen: dict[str, Any] = {}
    for level, metric, *_ in METRICS:
        values = {name: float(f"{value:.5g}") for name, value in tables[level][metric].items()}
        chosen.setdefault(level, {})[metric] = values
    ratio = found["ensemble_std"] / found["energy_std"]
    return {
        "structures": len(frames),
        **chosen,
        "ensemble over closed form, median sigma of energies": round(float(np.median(ratio)), 3),
        "wall seconds": round(float(found["seconds"]), 1),
    }


def measure(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train, wrap, predict and score with one seed."""
    name = f"{arguments.epochs}-{arguments.precision}-{arguments.members}-{seed}"
    folder = (arguments.folder / name).absolute()
    train(arguments, seed, folder)
    seconds = json.loads((folder / "seconds.json").read_text())
    result: dict[str, Any] = {
        "wall seconds, training": round(seconds["model"]),
        "wall seconds, llpr": round(seconds["llpr"], 1),
        "processor seconds of both": round(seconds["processor"]),
    }
    for label, file in SETS.items():
        found = predictions(arguments, folder, file)
        result["versions"] = json.loads(str(found["versions"]))
        result[label] = scores(*tested(read(arguments.data / "acac" / file), found))
    return result


def tested(frames: list[Atoms], found: dict[str, Any]) -> tuple[list[Atoms], dict[str, Any]]:
    """Return the frames that the study errorbars tests on, and their predictions."""
    from studies.errorbars.data import TESTED, evenly

    places = evenly(range(len(frames)), TESTED)
    by_frame = {
        name: found[name].reshape(len(frames), -1, *found[name].shape[1:])[places]
        for name in ("energy", "energy_std", "ensemble_std", "forces", "forces_std")
    }
    flat = {name: values.reshape(-1, *values.shape[2:]) for name, values in by_frame.items()}
    return [frames[place] for place in places], found | flat


def digits(value: float) -> str:
    """Format with three digits, without powers of ten."""
    return np.format_float_positional(value, precision=3, fractional=False, trim="-")


def table(seeds: dict[str, Any]) -> str:
    """Tabulate means over seeds, with their range, as markdown."""
    count = len(seeds)
    head = f"mean of {count} seeds (least to largest)" if count > 1 else "one seed"
    lines = [f"| {head} | unit | " + " | ".join(SETS) + " |", "|---|---|" + "---|" * len(SETS)]
    for level, metric, title, factor, unit in METRICS:
        cells = []
        for label in SETS:
            values = [factor * row[label][level][metric]["value"] for row in seeds.values()]
            spread = f" ({digits(min(values))} to {digits(max(values))})" if count > 1 else ""
            cells.append(digits(float(np.mean(values))) + spread)
        lines.append(f"| {title} | {unit} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write(arguments: argparse.Namespace, seeds: dict[str, Any]) -> None:
    """Write a .json and a .md file."""
    from blips.train.run import environment
    from studies.worker import checkout

    options = training_options(arguments, 0)
    del options["seed"]
    content = {
        "code": checkout(),
        "environment": environment(),
        "training": options,
        "llpr": llpr_options(arguments, 0)["architecture"],
        "splits": {
            "training": "train_300K.xyz, first 100",
            "validation": "train_300K.xyz, last 50",
            **SETS,
        },
        "intervals": "95 %, 1000 resamples of structures; energies in eV, forces in eV/A",
        "seeds": seeds,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    arguments.output.with_suffix(".md").write_text(table(seeds))


def main() -> None:
    """Measure every seed and write a .json and a .md file."""
    if sys.argv[1:2] == ["--predict"]:
        return predict(*map(Path, sys.argv[2:]))
    parser = argparse.ArgumentParser(description="Error bars of metatrain's LLPR.")
    add = parser.add_argument
    add("--mtt", type=Path, default=Path(".venv-metatrain/bin/mtt"), help="metatrain's program")
    add("--data", type=Path, default=os.environ.get("BLIPS_DATA"), help="folder that has acac")
    add("--epochs", type=int, default=500, help="ten minutes of one core; 100 by the package")
    add("--members", type=int, default=128, help="of the last-layer ensemble")
    add("--precision", type=int, choices=(32, 64), default=32, help="bits; 32 by the package")
    add("--seeds", type=int, nargs="+", default=[0])
    folder = Path(tempfile.gettempdir()) / "metatrain_llpr"
    add("--folder", type=Path, default=folder, help="of runs; finished ones are not repeated")
    add("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("set BLIPS_DATA or --data to the folder that has acac")
    if not arguments.mtt.exists():
        parser.error(f"there is no {arguments.mtt}; the docstring of this file says how to make it")
    seeds: dict[str, Any] = {}
    for seed in arguments.seeds:
        seeds[str(seed)] = measure(arguments, seed)
        print(table({str(seed): seeds[str(seed)]}), flush=True)
        write(arguments, seeds)


if __name__ == "__main__":
    main()
