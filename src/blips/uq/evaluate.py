"""All metrics of one model on one labelled set, with bootstrap intervals, in a single call."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from ase.data import chemical_symbols

from blips.errors import InputError
from blips.uq.checks import (
    FloatArray,
    IntArray,
    checked_counts,
    finite_array,
    positive_array,
    same_shape,
)
from blips.uq.evaluation import Evaluation
from blips.uq.levels import energy_tables, force_tables
from blips.uq.resampling import Resampling


def evaluate(
    energy: npt.ArrayLike | None,
    energy_std: npt.ArrayLike | None,
    energy_ref: npt.ArrayLike | None,
    forces: npt.ArrayLike | None,
    forces_std: npt.ArrayLike | None,
    forces_ref: npt.ArrayLike | None,
    n_atoms: npt.ArrayLike,
    numbers: npt.ArrayLike | None = None,
    n_bootstrap: int = 1000,
    seed: int = 0,
    *,
    level: float = 0.95,
    energy_unit: str = "eV",
    force_unit: str = "eV/A",
) -> Evaluation:
    """Evaluate predicted energies and forces with their uncertainties against references.

    Args:
        energy: predicted energies [S]; None, together with energy_ref, for forces alone.
        energy_std: their standard deviations [S]; None for a deterministic model.
        energy_ref: reference energies [S].
        forces: predicted forces [N, 3]; None, together with forces_ref, for energies alone.
        forces_std: their standard deviations [N, 3]; None for a deterministic model.
        forces_ref: reference forces [N, 3], structures one after the other.
        n_atoms: number of atoms of each structure [S], adding up to N.
        numbers: atomic numbers [N] for the per-element breakdown, or None for no breakdown.
        n_bootstrap: resamples of structures for the intervals; 0 for values alone.
        seed: seed of the resampling.
        level: confidence level of the intervals.
        energy_unit: name of the unit of the energies.
        force_unit: name of the unit of the forces.

    Returns:
        An Evaluation. Metrics that the data are too few for are named in its ``omitted``; a single
        structure cannot be resampled and has values without intervals.
    """
    if n_bootstrap < 0:
        raise InputError(f"n_bootstrap={n_bootstrap}; expected 0 (no intervals) or more.")
    energies = _checked("energy", energy, energy_std, energy_ref, 1)
    vectors = _checked("forces", forces, forces_std, forces_ref, 2)
    if energies is None and vectors is None:
        raise InputError("nothing to evaluate; pass energies, forces, or both with references.")
    counts = checked_counts(n_atoms, None if vectors is None else len(vectors[0]))
    if energies is not None and len(energies[0]) != len(counts):
        raise InputError(
            f"there are {len(energies[0])} energies but n_atoms has {len(counts)} structures; "
            "expected one entry per structure in both."
        )
    elements = None if numbers is None else _checked_numbers(numbers, int(counts.sum()))
    how = Resampling(len(counts), n_bootstrap, level, seed)
    tables: dict[str, Any] = {}
    if energies is not None:
        tables |= energy_tables(*energies, counts, how)
    if vectors is not None:
        tables |= force_tables(*vectors, counts, elements, how)
    return Evaluation(
        n_structures=len(counts),
        n_atoms=int(counts.sum()),
        level=level,
        n_bootstrap=n_bootstrap if how.active else 0,
        seed=seed,
        energy_unit=energy_unit,
        force_unit=force_unit,
        omitted=tuple(how.omitted),
        **tables,
    )


def _checked(
    name: str,
    mean: npt.ArrayLike | None,
    std: npt.ArrayLike | None,
    reference: npt.ArrayLike | None,
    n_dimensions: int,
) -> tuple[FloatArray, FloatArray | None, FloatArray] | None:
    """Validate one predicted quantity; None if nothing of it is given."""
    if mean is None and reference is None and std is None:
        return None
    if mean is None or reference is None:
        missing = name if mean is None else f"{name}_ref"
        raise InputError(
            f"{missing} is missing; expected {name} and {name}_ref together. Pass both or neither."
        )
    arrays = {name: finite_array(name, mean)}
    arrays[f"{name}_ref"] = finite_array(f"{name}_ref", reference)
    if std is not None:
        arrays[f"{name}_std"] = positive_array(f"{name}_std", std)
    same_shape(**arrays)
    if arrays[name].ndim != n_dimensions:
        expected = "[S], one per structure" if n_dimensions == 1 else "[N, 3], one row per atom"
        raise InputError(f"{name} has shape {arrays[name].shape}; expected {expected}. Reshape it.")
    return arrays[name], arrays.get(f"{name}_std"), arrays[f"{name}_ref"]


def _checked_numbers(numbers: npt.ArrayLike, n_atoms: int) -> IntArray:
    array = finite_array("numbers", numbers)
    whole = np.all(array == np.round(array)) and array.min() >= 0
    if array.shape != (n_atoms,) or not whole or array.max() >= len(chemical_symbols):
        raise InputError(
            f"numbers have shape {array.shape} for {n_atoms} atoms; expected one atomic number "
            f"between 0 and {len(chemical_symbols) - 1} per atom, e.g. atoms.numbers concatenated."
        )
    return array.astype(np.int64)
