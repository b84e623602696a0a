"""Are the error bars right that released models come with? Near MPtrj, and on hot, dense crystals.

    python -m studies.released.errorbars
    python -m studies.released.errorbars --quantity energies
    python -m studies.released.errorbars --models mace.safetensors  # one more in the table

Near: structures of MPtrj that the posteriors have not seen; far: crystals at high temperature and
pressure (`studies.released.data`, from $BLIPS_DATA). Beside the rank correlation of the std of
forces stands that of the trivial guess, the magnitude of the predicted force. Energies are compared
per atom, as released and after the energies per element have been aligned with the labels of
validation structures (`blips.train.references.align`), which are without corrections that models
include.
"""

import argparse
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from scipy.stats import norm, spearmanr

from blips.errors import InputError
from blips.potential import BayesianPotential
from blips.prediction import Prediction
from blips.train.references import align
from blips.train.released import load
from blips.train.run import environment
from blips.uq.assess import References, assess
from studies.released.data import hot_structures, mptrj_split
from studies.worker import checkout

LOOKED_AT = 100  # of each set: seen while the set-up of the posteriors was chosen, so left out
MODELS = ("chgnet", "mattersim-1m", "sevennet-0")
COLUMNS = {
    "F MAE": ("forces", "mae"),
    "within 90 %": ("forces", "coverage_90"),
    "ECE": ("forces", "ece"),
    "rho structures": ("forces_per_structure", "spearman"),
    "rho atoms": ("forces_per_atom", "spearman"),
}


def measure_forces(prediction: Prediction, structures: list[Atoms], bootstrap: int) -> Any:
    """Compute metrics with intervals, and those of ranking by the size of the force alone."""
    references = References.of(structures)
    evaluation = assess(prediction, references, n_bootstrap=bootstrap)
    found = {
        name: vars(getattr(evaluation, level)[metric]) for name, (level, metric) in COLUMNS.items()
    }
    error = ((prediction.array("forces") - references.forces) ** 2).sum(axis=1)
    size = (prediction.array("forces") ** 2).sum(axis=1)
    owner = np.repeat(np.arange(len(structures)), prediction.n_atoms)
    sums = [np.bincount(owner, values) / prediction.n_atoms for values in (error, size)]
    found["rho structures, by |F|"] = {"value": _rank_correlation(*sums)}
    found["rho atoms, by |F|"] = {"value": _rank_correlation(error, size)}
    return found


def measure_energies(prediction: Prediction, structures: list[Atoms]) -> Any:
    """Compute MAE, coverage of the 90 % interval and rank correlation of energies per atom."""
    labels = References.of(structures).energy
    error = np.abs(prediction.array("energy") - labels) / prediction.n_atoms
    std = prediction.array("energy_total_std") / prediction.n_atoms
    found = {
        "E MAE": error.mean(),
        "E within 90 %": (error < norm.ppf(0.95) * std).mean(),
        "rho E": _rank_correlation(error, std),
    }
    return {name: {"value": float(value)} for name, value in found.items()}


def _rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.asarray(spearmanr(first, second))[0])


def measure_model(name: str, data: Path, quantity: str, count: int, bootstrap: int) -> Any:
    """Measure forces or energies of both sets of one model."""
    potential = load(name)
    if not isinstance(potential, BayesianPotential):
        raise InputError(f"{name} has no error bars")
    fresh = slice(LOOKED_AT, LOOKED_AT + count)
    _, valid, unseen = mptrj_split(data, potential.backbone)
    sets = {"near": unseen[fresh], "far": hot_structures(data, potential.backbone)[fresh]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # elements that the conditioning structures lack
        if quantity == "forces":
            return {
                label: measure_forces(_predict(potential, structures), structures, bootstrap)
                for label, structures in sets.items()
            }
        return _energies(potential, sets, valid)


def _predict(
    potential: BayesianPotential, structures: list[Atoms], *, forces: bool = True
) -> Prediction:
    return potential.predict(structures, batch_size=1, forces=forces)


def _energies(
    potential: BayesianPotential, sets: dict[str, list[Atoms]], valid: list[Atoms]
) -> Any:
    """Predict energies after the alignment with validation structures, and as released."""
    released = {
        label: measure_energies(_predict(potential, structures, forces=False), structures)
        for label, structures in sets.items()
    }
    std = _predict(potential, valid, forces=False).array("energy_total_std")
    align(potential, valid, var=std**2)
    found = {}
    for label, structures in sets.items():
        aligned = measure_energies(_predict(potential, structures, forces=False), structures)
        before = {f"{name}, as released": value for name, value in released[label].items()}
        found[label] = aligned | before
    return found | {"alignment": str(potential.alignment)}


def table(found: dict[str, Any]) -> str:
    """Format the results as Markdown, a row for each model and set."""
    columns = list(next(iter(found.values()))["near"])
    lines = ["| model | set | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 2)]
    for name, sets in found.items():
        for label in ("near", "far"):
            cells = [f"{sets[label][column]['value']:.3g}" for column in columns]
            lines.append("| " + " | ".join([name, label, *cells]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write JSON and Markdown, model by model; others that are there stay."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="names, or checkpoints")
    parser.add_argument("--quantity", choices=("forces", "energies"), default="forces")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("BLIPS_DATA", ".")))
    parser.add_argument("--structures", type=int, default=60)
    parser.add_argument("--bootstrap", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=Path("results/released"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    output = options.folder / f"{options.quantity}.json"
    found: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    for name in options.models:
        measured = measure_model(
            name, options.data, options.quantity, options.structures, options.bootstrap
        )
        code = {"code": checkout(), "environment": environment(), "structures": options.structures}
        found[Path(name).stem] = measured | code
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(found, indent=1) + "\n")
        output.with_suffix(".md").write_text(table(found))
        print(table(found), flush=True)


if __name__ == "__main__":
    main()
