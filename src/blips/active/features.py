"""Invariant features of a structure, to tell whether two candidates are alike.

For every pair of elements (a, b): the smeared histogram of distances from atoms a to their
neighbours b within a cutoff, weighted to vanish there, per atom of the structure:

    f_ab(mu) = 1/N sum_{i in a} sum_{j in b} exp(-(r_ij - mu)^2 / 2 w^2) (1 + cos(pi r_ij / c)) / 2

It does not change under rotation, translation and relabelling.
"""

from collections.abc import Sequence

import numpy as np
from ase import Atoms
from vesin import NeighborList

CUTOFF = 5.0  # A
CENTRES = np.linspace(0.6, CUTOFF, 24)  # A
WIDTH = 0.2  # A


def structure_features(structures: Sequence[Atoms]) -> np.ndarray:
    """Features of structures, [S, pairs of elements x centres]."""
    elements = sorted({int(z) for atoms in structures for z in atoms.numbers})
    place = {z: i for i, z in enumerate(elements)}
    features = np.zeros((len(structures), len(elements) ** 2, len(CENTRES)))
    for s, atoms in enumerate(structures):
        first, second, distance = NeighborList(cutoff=CUTOFF, full_list=True, sorted=False).compute(
            atoms.positions, atoms.cell.array, atoms.pbc, "ijd"
        )
        kinds = np.array([place[int(z)] for z in atoms.numbers])  # [N]
        pair = kinds[first] * len(elements) + kinds[second]  # [E]
        weight = 0.5 * (1.0 + np.cos(np.pi * distance / CUTOFF)) / len(atoms)  # [E]
        smeared = np.exp(-0.5 * ((distance[:, None] - CENTRES) / WIDTH) ** 2)
        np.add.at(features[s], pair, smeared * weight[:, None])
    return features.reshape(len(structures), -1)
