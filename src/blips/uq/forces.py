"""Force predictions per atom and per structure, the items that ranking metrics order.

Letters in shape comments: N atoms, S structures.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blips.uq.checks import FloatArray, checked_counts, checked_vectors


class AtomForces(NamedTuple):
    """Per-atom reductions of force predictions, each [N]."""

    variance: FloatArray
    """Summed component variances, (eV/A)^2."""
    squared_error: FloatArray
    """Squared norm of the force error, (eV/A)^2."""


class StructureForces(NamedTuple):
    """Per-structure reductions of force predictions, each [S].

    The mean force VECTOR of a structure is the net force, which is zero for every conservative
    model whatever its quality; therefore norms are averaged instead. ``norm_std`` has the scale of
    one atom's force error. It ranks structures, but is larger than the spread of an average over
    many atoms with independent errors: even an ideal model has an ECE above 0 at this level.
    """

    norm: FloatArray
    """Atom-mean of the predicted force norms, eV/A."""
    norm_std: FloatArray
    """Root of the atom-mean of the summed component variances, eV/A."""
    norm_ref: FloatArray
    """Atom-mean of the reference force norms, eV/A."""
    squared_error: FloatArray
    """Atom-mean of the squared norms of the force errors, (eV/A)^2."""


def atom_forces(
    forces: npt.ArrayLike, forces_std: npt.ArrayLike, forces_ref: npt.ArrayLike
) -> AtomForces:
    """Reduce force components [N, 3] to one variance and one squared error norm per atom."""
    forces, forces_std, forces_ref = checked_vectors(forces, forces_std, forces_ref)
    squared_error = np.sum((forces_ref - forces) ** 2, axis=1)
    return AtomForces(np.sum(forces_std**2, axis=1), squared_error)


def structure_forces(
    forces: npt.ArrayLike,
    forces_std: npt.ArrayLike,
    forces_ref: npt.ArrayLike,
    n_atoms: npt.ArrayLike,
) -> StructureForces:
    """Reduce force components [N, 3] to per-structure norms, sigma and squared errors, [S]."""
    forces, forces_std, forces_ref = checked_vectors(forces, forces_std, forces_ref)
    counts = checked_counts(n_atoms, len(forces))
    starts = np.cumsum(counts) - counts

    def atom_mean(per_atom: FloatArray) -> FloatArray:  # [N] -> [S]
        return np.add.reduceat(per_atom, starts) / counts

    variance, squared_error = atom_forces(forces, forces_std, forces_ref)
    return StructureForces(
        norm=atom_mean(np.linalg.norm(forces, axis=1)),
        norm_std=np.sqrt(atom_mean(variance)),
        norm_ref=atom_mean(np.linalg.norm(forces_ref, axis=1)),
        squared_error=atom_mean(squared_error),
    )
