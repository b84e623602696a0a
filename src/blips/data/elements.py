"""Energy of each element, for `ReferenceEnergies.set` of a backbone.

Total energies are mostly the sum of what each atom brings. With n_sz atoms of element z in
structure s,

    e = argmin_e  sum_s ( E_s - sum_z n_sz e_z )^2,   of least norm where that is not unique

(it is not where all structures have the same stoichiometry).
"""

from collections.abc import Sequence

import numpy as np
import torch
from ase import Atoms
from ase.data import chemical_symbols

from blips import keys
from blips.data.graph import AtomGraph, Graph
from blips.data.labels import Labels, extract
from blips.errors import InputError

NUM_ELEMENTS = len(chemical_symbols)  # 0 ("X") to 118


def fit_reference_energies(
    structures: Sequence[Atoms], labels: Labels | None = None
) -> dict[int, float]:
    """Fit the energy of each element to energies of structures, eV by atomic number."""
    counts = element_counts(structures)  # [S, 119]
    energies = [extract(atoms, (keys.ENERGY,), labels)[keys.ENERGY] for atoms in structures]
    present = np.flatnonzero(counts.any(axis=0))
    fitted, *_ = np.linalg.lstsq(counts[:, present].astype(float), energies, rcond=None)
    return dict(zip(present.tolist(), fitted.tolist(), strict=True))


def element_counts(structures: Sequence[Atoms] | Graph) -> np.ndarray:
    """Count the atoms of each element in each structure, [S, 119]."""
    if not isinstance(structures, Graph):
        return np.array([np.bincount(a.numbers, minlength=NUM_ELEMENTS) for a in structures])
    graph = structures
    if not isinstance(graph, AtomGraph):
        raise InputError(f"elements need atoms; the data set has a {type(graph).__name__}")
    flat = graph.structure * NUM_ELEMENTS + graph.numbers
    counts = torch.bincount(flat, minlength=graph.num_structures * NUM_ELEMENTS)
    return counts.reshape(graph.num_structures, NUM_ELEMENTS).cpu().numpy()
