"""Energy of each element and the energy scale, for `ReferenceEnergies.set` of a backbone.

Total energies are mostly the sum of what each atom brings. With n_sz atoms of element z in
structure s,

    e = argmin_e  sum_s ( E_s - sum_z n_sz e_z )^2,   of least norm where that is not unique

(it is not where all structures have the same stoichiometry). What remains is of the order of the
scale, which a network then predicts in units of about one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from ase import Atoms
from ase.data import chemical_symbols

from blips import keys
from blips.data.batch import TrainingData
from blips.data.graph import AtomGraph, Graph
from blips.data.labels import Labels, extract
from blips.errors import InputError

NUM_ELEMENTS = len(chemical_symbols)  # 0 ("X") to 118
CHUNK = 256
MAX_STRUCTURES = 50_000

Labelled = TrainingData | Iterable[Atoms]


def fit_reference_energies(data: Labelled, labels: Labels | None = None) -> dict[int, float]:
    """Fit the energy of each element, eV by atomic number.

    Args:
        data: a data set (at most 50,000 evenly spaced structures of it are used) or structures
            with energies.
        labels: names and units of the energies, where `data` are structures.
    """
    pieces = list(_pieces(data, labels, (keys.ENERGY,)))
    counts = np.concatenate([piece.counts for piece in pieces])  # [S, 119]
    energies = np.concatenate([piece.energies for piece in pieces])  # [S] eV
    present = np.flatnonzero(counts.any(axis=0))
    fitted, *_ = np.linalg.lstsq(counts[:, present].astype(float), energies, rcond=None)
    return dict(zip(present.tolist(), fitted.tolist(), strict=True))


def energy_scale(
    data: Labelled,
    reference: Mapping[int, float] | None = None,
    labels: Labels | None = None,
) -> float:
    """Return the typical size of the energies that a network has to predict, eV.

    With `reference`, the root mean square of (E - sum of reference energies) / atoms; without,
    that of the force components times 1 A. 1 eV where all of them are zero.

    Args:
        data: as for `fit_reference_energies`.
        reference: energy of each element, eV.
        labels: names and units of the labels, where `data` are structures.
    """
    total, count = 0.0, 0
    for piece in _pieces(data, labels, (keys.FORCES if reference is None else keys.ENERGY,)):
        rest = piece.forces if reference is None else piece.energies_beyond(reference)
        total += float(np.square(rest).sum())
        count += rest.size
    return float(np.sqrt(total / count)) or 1.0


@dataclass(frozen=True)
class _Piece:
    """Some structures of a data set."""

    counts: np.ndarray  # [S, 119] atoms of each element
    energies: np.ndarray  # [S] eV, empty where not asked for
    forces: np.ndarray  # [N, 3] eV/A, empty where not asked for

    def energies_beyond(self, reference: Mapping[int, float]) -> np.ndarray:
        """Compute (E - sum of reference energies) / atoms, [S] eV."""
        unknown = set(np.flatnonzero(self.counts.any(axis=0)).tolist()) - reference.keys()
        if unknown:
            symbols = ", ".join(chemical_symbols[z] for z in sorted(unknown))
            raise InputError(f"no reference energy for {symbols}; fit them on this data set")
        shift = np.zeros(NUM_ELEMENTS)
        shift[list(reference.keys())] = list(reference.values())
        return (self.energies - self.counts @ shift) / self.counts.sum(axis=1)


def _pieces(data: Labelled, labels: Labels | None, quantities: tuple[str, ...]) -> Iterator[_Piece]:
    if isinstance(data, Iterable):
        for atoms in data:
            found = extract(atoms, quantities, labels)
            yield _piece(
                element_counts([atoms]),
                {name: np.atleast_1d(value) for name, value in found.items()},
            )
        return
    size = len(data)
    indices = np.linspace(0, size - 1, min(size, MAX_STRUCTURES)).astype(int).tolist()
    for first in range(0, len(indices), CHUNK):
        batch = data.batch(indices[first : first + CHUNK])
        missing = [name for name in quantities if name not in batch.targets]
        if missing:
            raise InputError(
                f"the data set has {', '.join(batch.targets)}, not {missing[0]}; "
                f"add {missing[0]!r} to its quantities"
            )
        targets = {name: batch.targets[name].double().cpu().numpy() for name in quantities}
        yield _piece(element_counts(batch.graph), targets)


def _piece(counts: np.ndarray, targets: Mapping[str, np.ndarray]) -> _Piece:
    empty = np.empty(0)
    return _Piece(counts, targets.get(keys.ENERGY, empty), targets.get(keys.FORCES, empty))


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
