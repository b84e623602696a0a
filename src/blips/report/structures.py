"""The most uncertain structures of a set, for the page's 3D view."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from ase import Atoms

from blips.prediction import Prediction
from blips.report.plots import numbers
from blips.uq.assess import References

MAX_ATOMS = 2000


def uncertain_structures(
    structures: Sequence[Atoms], prediction: Prediction, references: References, count: int
) -> list[dict[str, Any]]:
    """Those with the largest atomic force sigma (root of the summed component variances)."""
    if prediction.forces_total_std is None:
        return []
    sigma = np.linalg.norm(prediction.forces_total_std, axis=1)  # [N]
    error = None
    if references.forces is not None:
        error = np.linalg.norm(prediction.array("forces") - references.forces, axis=1)  # [N]
    ends = np.cumsum(references.n_atoms)
    atoms_of = [slice(end - n, end) for end, n in zip(ends, references.n_atoms, strict=True)]
    largest = np.array([sigma[atoms].max() for atoms in atoms_of])  # [S]
    order = [k for k in np.argsort(-largest, kind="stable") if len(structures[k]) <= MAX_ATOMS]
    return [
        _entry(
            int(k), structures[k], sigma[atoms_of[k]], None if error is None else error[atoms_of[k]]
        )
        for k in order[:count]
    ]


def _entry(index: int, atoms: Atoms, sigma: np.ndarray, error: np.ndarray | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "index": index,
        "formula": atoms.get_chemical_formula(),
        "symbols": list(atoms.symbols),
        "positions": [numbers(row) for row in atoms.positions],
        "sigma": numbers(sigma, 4),
        "sigma_max": numbers(sigma.max(), 4)[0],
    }
    if error is not None:
        entry["error"] = numbers(error, 4)
    if atoms.pbc.any():
        entry["cell"] = [numbers(row) for row in atoms.cell.array]
    return entry
