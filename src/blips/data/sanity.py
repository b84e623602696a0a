r"""Do labels look like energies in eV and forces in eV/A? Warnings where they do not.

* Stiffness of bonds: the force that pushes two neighbours apart, (F_j - F_i) . r / (2 |r|), falls
  with their distance by k = c e^2 / (4 pi epsilon_0 l^3). Here l is the sum of their covalent radii
  and c from 1 (lithium) to 28 (N2), mostly 3 (molecules) to 10 (silica). A negative c tells a wrong
  sign, a larger one labels in kcal/mol or kJ/mol, a smaller one labels in Hartree.
* Energies against forces: for two frames of the same atoms that differ by small displacements d,
  E_2 - E_1 is about -(F_1 + F_2) . d / 2. The slope of one on the other is 1; -1 tells a wrong
  sign, 27.2 Hartree beside eV.
* No energy lies below that of all electrons, for which Thomas-Fermi theory has the bound
  -20.9 eV Z^(7/3) an atom: lower total energies are in kcal/mol or kJ/mol.

The first two are blind to the orientation of molecules, and speak only where the correlation is
high, so labels of another kind, or too few, are passed.
"""

import warnings
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms, units
from ase.build.rotate import rotation_matrix_from_points
from ase.data import covalent_radii
from ase.geometry import find_mic

from blips import keys
from blips.data.labels import Labels, available, extract
from blips.data.neighbours import search
from blips.data.structures import XyzFrames
from blips.units import ENERGY_UNITS

MOST_FRAMES, LEAST_FRAMES, LEAST_BONDS = 200, 8, 24
BONDED = 1.1  # times the sum of covalent radii
BOND_CORRELATION = 0.5  # of forces with distances
SOFTEST, STIFFEST = 0.25, 40.0  # c
LARGEST_MOVE = 0.6  # A, of an atom between two frames that are compared
HIGH_CORRELATION = 0.9  # of energies with forces
THOMAS_FERMI, BINDING = 20.92, 15.0  # eV Z^(7/3), and eV that an atom may be bound with
COULOMB = units.Hartree * units.Bohr  # e^2 / (4 pi epsilon_0), eV A

Structures = Sequence[Atoms] | XyzFrames


class Frame(NamedTuple):
    """A structure with labels, NaN for those that it has not."""

    atoms: Atoms
    forces: np.ndarray  # [N, 3] eV/A
    energy: float  # eV


def warn_of_labels(structures: Structures, labels: Labels | None = None) -> None:
    """Warn of labels that look as if their unit or sign were another one."""
    for problem in suspicions(structures, labels):
        warnings.warn(
            f"the labels look wrong: {problem}. Check their names and units (energy_unit, "
            "length_unit of the labels)",
            stacklevel=3,
        )


def suspicions(structures: Structures, labels: Labels | None = None) -> list[str]:
    """Describe what looks wrong with labels; nothing where they look right or cannot be judged."""
    count = len(structures)
    spaced = np.linspace(0, count - 1, min(count, MOST_FRAMES)).astype(int)
    frames: list[Frame] = []
    for k in np.unique(spaced).tolist():
        atoms = structures[k]
        has = [name for name in available(atoms, labels) if name != keys.STRESS]
        values: dict[str, Any] = {keys.FORCES: np.nan, keys.ENERGY: np.nan}
        values |= extract(atoms, has, labels)
        frames.append(Frame(atoms, values[keys.FORCES], float(values[keys.ENERGY])))
    moved = [frame for frame in frames if np.ndim(frame.forces) and len(frame.atoms) > 1]
    found = _energies_against_forces(moved), _stiffness(moved), _below_all_electrons(frames)
    return [sentence for sentence in found if sentence]


def _stiffness(frames: Sequence[Frame]) -> str | None:
    """Fit one c to all bonds, around the mean distance and force of those of the same elements."""
    bonds = [_bonds(frame) for frame in frames]
    if sum(one.size > 0 for one in bonds) < LEAST_FRAMES:
        return None
    elements, *columns = np.concatenate(bonds, axis=1)
    _, kind = np.unique(elements, return_inverse=True)
    count = np.bincount(kind)
    x, y = (values - (np.bincount(kind, values) / count)[kind] for values in columns)
    if len(x) < LEAST_BONDS or not (x.std() > 1e-4 and y.std() > 0):
        return None
    c, correlation = -float(x @ y / (x @ x)), np.corrcoef(x, y)[0, 1]
    if correlation > BOND_CORRELATION:
        return "bonds are pushed apart the more, the longer they are: forces of wrong sign?"
    if correlation > -BOND_CORRELATION or SOFTEST < c < STIFFEST:
        return None
    unit = "kcal/mol or kJ/mol" if c > STIFFEST else "Hartree or Rydberg"
    return (
        f"bonds have a stiffness of {c:.2g} e^2 / (4 pi epsilon_0 l^3), where l is the sum of "
        f"covalent radii, in place of 1 to 28: are the forces in {unit}?"
    )


def _bonds(frame: Frame) -> np.ndarray:
    """List elements (as a number), distance / l, and push apart (e^2 / l^2) of bonds, [3, n]."""
    atoms, forces, _ = frame
    radii = covalent_radii[atoms.numbers]
    i, j, between, distance = search(atoms, BONDED * 2.0 * float(radii.max()), "ijDd")
    i, j = i.astype(np.int64), j.astype(np.int64)
    length = radii[i] + radii[j]
    bonded = (i < j) & (distance > 0) & (distance < BONDED * length)
    i, j, between, distance, length = (a[bonded] for a in (i, j, between, distance, length))
    push = 0.5 * ((forces[j] - forces[i]) * between).sum(axis=1) / distance
    lighter, heavier = np.sort(atoms.numbers[[i, j]], axis=0)
    return np.stack([1000 * lighter + heavier, distance / length, push * length**2 / COULOMB])


def _energies_against_forces(frames: Sequence[Frame]) -> str | None:
    series: dict[tuple[int, ...], list[Frame]] = {}  # of the same atoms in the same order
    for frame in frames:
        if not np.isnan(frame.energy):
            series.setdefault(tuple(frame.atoms.numbers), []).append(frame)
    work, change = [], []
    for members in series.values():
        if len(members) < LEAST_FRAMES:
            continue
        for first, second in pairwise(members) if len(members) > 30 else combinations(members, 2):
            move, turn = _displacement(first.atoms, second.atoms)
            if 0 < np.abs(move).max() <= LARGEST_MOVE:
                work.append(-0.5 * float(((first.forces + second.forces @ turn.T) * move).sum()))
                change.append(second.energy - first.energy)
    if len(work) < LEAST_FRAMES or not np.any(work) or not np.std(change) > 0:
        return None
    slope, correlation = np.polyfit(work, change, 1)[0], np.corrcoef(work, change)[0, 1]
    if abs(correlation) < HIGH_CORRELATION or 0.5 < slope < 2.0:
        return None
    if slope < 0:
        return "energies rise where forces say that they fall: is the sign of the forces wrong?"
    return (
        f"differences of energies are {slope:.3g} times what forces along the displacements give "
        f"({len(work)} pairs of frames); {_units(slope)}"
    )


def _units(factor: float) -> str:
    """Return the unit that a factor between energies and forces suggests."""
    for unit, size in ENERGY_UNITS.items():
        for value, who in ((1 / size, "energies"), (size, "forces")):
            if abs(np.log(factor / value)) < 0.1:
                return f"are the {who} in {unit}, the others in eV?"
    return "they are not in the same unit"


def _displacement(first: Atoms, second: Atoms) -> tuple[np.ndarray, np.ndarray]:
    """Return displacements [N, 3] after the best superposition, and its rotation [3, 3]."""
    if first.pbc.any():
        moved = second.positions - first.positions
        moved, _ = find_mic(moved, first.cell, first.pbc)  # pyright: ignore[reportArgumentType]
        return moved, np.eye(3)
    before, after = (r - r.mean(axis=0) for r in (first.positions, second.positions))
    turn = rotation_matrix_from_points(after.T, before.T)
    return after @ turn.T - before, turn


def _below_all_electrons(frames: Sequence[Frame]) -> str | None:
    for atoms, _, energy in frames:
        lowest = -float((THOMAS_FERMI * atoms.numbers ** (7 / 3) + BINDING).sum())
        if energy < lowest:
            return (
                f"the energy of {atoms.get_chemical_formula()} is {energy:.4g} eV, and that of all "
                f"its electrons above {lowest:.4g} eV: are energies in kcal/mol or kJ/mol?"
            )
    return None
