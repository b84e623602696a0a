"""Structures that benchmarks share: NH3, and cells of alpha quartz."""

import numpy as np
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.spacegroup import crystal

CELLS = {36: (2, 2, 1), 144: (4, 4, 1), 720: (4, 4, 5)}  # atoms -> repeats of the cell of 9
SIZES = (4, *CELLS)
STD = 0.05  # A


def structure(atoms: int, seed: int = 0) -> Atoms:
    """Make NH3 for 4 atoms, otherwise quartz, displaced by 0.05 A."""
    whole = molecule("NH3") if atoms == 4 else quartz() * CELLS[atoms]
    return displaced(whole, STD, seed)


def quartz() -> Atoms:
    """Make alpha quartz, 9 atoms."""
    cell = crystal(
        ["Si", "O"],
        [(0.4697, 0, 1 / 3), (0.4133, 0.2672, 0.2144)],
        spacegroup=152,
        cellpar=[4.9137, 4.9137, 5.4047, 90, 90, 120],
    )
    return Atoms(cell.numbers, cell.positions, cell=cell.cell, pbc=True)


def displaced(atoms: Atoms, std: float, seed: int) -> Atoms:
    """Copy with every coordinate displaced by N(0, std^2), A."""
    moved = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
    moved.positions += np.random.default_rng(seed).normal(scale=std, size=moved.positions.shape)
    return moved


def labelled(atoms: Atoms, seed: int) -> Atoms:
    """Copy with a random energy and random forces."""
    rng = np.random.default_rng(seed)
    copy = atoms.copy()
    forces = rng.normal(size=copy.positions.shape)
    copy.calc = SinglePointCalculator(copy, energy=rng.normal(), forces=forces)
    return copy
