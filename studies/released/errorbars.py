"""Are the error bars right that released models come with? Near MPtrj, and on hot, dense crystals.

    python -m studies.released.errorbars --output results/released/errorbars

Near: structures of MPtrj that the shipped posteriors have not seen; far: crystals at high
temperature and pressure (`studies.released.data`, from $BLIPS_DATA). Energies per atom
are compared after a fit per element to the validation structures (`studies.released.energies`):
those of the labels are without corrections that models include. Beside the rank correlation of
std stands that of the trivial guess, the magnitude of the predicted force.
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
from scipy.stats import spearmanr

from blips.errors import InputError
from blips.potential import BayesianPotential
from blips.train.released import load
from blips.train.run import environment
from blips.uq.assess import References, assess
from studies.released.data import hot_structures, mptrj_split
from studies.released.energies import ElementShift, measure_energies
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


def measure(
    potential: BayesianPotential, structures: list[Atoms], shift: ElementShift, bootstrap: int
) -> Any:
    """Metrics with intervals, and what ranking by the size of the force alone gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # elements that 500 structures lack
        prediction = potential.predict(structures, batch_size=1)
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
    return found | measure_energies(prediction, structures, shift)


def _rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.asarray(spearmanr(first, second))[0])


def measure_model(name: str, data: Path, count: int, bootstrap: int) -> dict[str, Any]:
    """Both sets of one model."""
    potential = load(name)
    if not isinstance(potential, BayesianPotential):
        raise InputError(f"{name} has no error bars")
    fresh = slice(LOOKED_AT, LOOKED_AT + count)
    _, valid, unseen = mptrj_split(data, potential.backbone)
    shift = ElementShift.of(potential, valid)
    sets = {"near": unseen[fresh], "far": hot_structures(data, potential.backbone)[fresh]}
    return {
        label: measure(potential, structures, shift, bootstrap)
        for label, structures in sets.items()
    }


def table(found: dict[str, Any]) -> str:
    """Markdown, a row for each model and set."""
    columns = list(next(iter(found.values()))["near"])
    lines = ["| model | set | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 2)]
    for name, sets in found.items():
        for label, metrics in sets.items():
            cells = [f"{metrics[column]['value']:.3g}" for column in columns]
            lines.append("| " + " | ".join([name, label, *cells]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write JSON and Markdown, model by model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="names, or checkpoints")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("BLIPS_DATA", ".")))
    parser.add_argument("--structures", type=int, default=60)
    parser.add_argument("--bootstrap", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=Path("results/released/errorbars"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in options.models:
        found[Path(name).stem] = measure_model(
            name, options.data, options.structures, options.bootstrap
        )
        content = {
            "code": checkout(),
            "environment": environment(),
            "structures": options.structures,
            "results": found,
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(table(found))
        print(table(found), flush=True)


if __name__ == "__main__":
    main()
