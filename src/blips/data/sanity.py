r"""Do labels look like energies in eV and forces in eV/A? Warnings where they do not.

Two tests need no more than single structures:

* Close contacts: two atoms nearer than 0.85 of the sum of their covalent radii repel each other, by
  no more than twice what the screened nuclei do (Ziegler, Biersack and Littmark; 0.1 to 0.3 of that
  in molecules and oxides, 1.4 in lithium). Most of them pulled together tell a wrong sign, a much
  stronger repulsion labels in kcal/mol or kJ/mol.
* No energy lies below that of all electrons, for which Thomas-Fermi theory has the bound
  -20.9 eV Z^(7/3) an atom: lower total energies are in kcal/mol or kJ/mol.

Two more, both blind to the orientation of molecules, need frames of the same atoms in the same
order:

* Energies against forces: for two frames that differ by small displacements d, E_2 - E_1 is about
  -(F_1 + F_2) . d / 2. The slope of one on the other is 1; -1 tells a wrong sign, 27.2 Hartree
  beside eV.
* Stiffness of bonds: the force that pushes two neighbours apart, (F_j - F_i) . r / (2 |r|), falls
  with their distance by k = 1 to 150 eV/A^2. k < 0 tells a wrong sign, k of many hundreds labels in
  kcal/mol or kJ/mol, bonds of hydrogen with k of 1 labels in Hartree.

They speak only where the correlation is high, so labels of another kind, or too few, are passed.
"""

import warnings
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms, units
from ase.data import chemical_symbols, covalent_radii
from ase.geometry import find_mic

from blips import keys
from blips.data.labels import Labels, available, extract
from blips.data.neighbours import search
from blips.data.structures import XyzFrames

MOST_FRAMES, MOST_ATOMS = 200, 200
LEAST_FRAMES = 8
LARGEST_MOVE = 0.6  # A, of an atom between two frames that are compared
HIGH_CORRELATION = 0.9  # of energies with forces
BOND_CORRELATION = 0.7  # of forces with distances
STIFFEST, SOFTEST_WITH_HYDROGEN = 250.0, 4.0  # eV/A^2; N2 has 143, C-H, N-H and O-H 28 to 50
CLOSE = 0.85  # of the sum of covalent radii
LEAST_CONTACTS = 4
PULLED = 0.9  # share of close contacts that are pulled together, where the sign is wrong
STRONGEST = 2.0  # median push over the repulsion of the nuclei
NOTICEABLE = 0.5  # eV/A
THOMAS_FERMI, BINDING = 20.92, 15.0  # eV Z^(7/3), and eV that an atom may be bound with
SCREENING = np.array([[0.18175, 3.1998], [0.50986, 0.94229], [0.28022, 0.4029], [0.02817, 0.20162]])
COULOMB = units.Hartree * units.Bohr  # e^2 / (4 pi epsilon_0), eV A
FACTORS = {23.06: "kcal/mol", 96.49: "kJ/mol", 27.21: "Hartree", 13.61: "Rydberg"}

Array = np.ndarray
Structures = Sequence[Atoms] | XyzFrames


class Frame(NamedTuple):
    """A structure with labels."""

    atoms: Atoms
    forces: Array  # [N, 3] eV/A
    energy: float  # eV, NaN without


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
    few = [structures[k] for k in np.unique(spaced).tolist()]
    every = _series(few, labels)
    series = [frames for frames in every if len(frames) >= LEAST_FRAMES]
    found = (
        _energies_against_forces(series),
        _stiffness(series) or _close_contacts([frame for frames in every for frame in frames]),
        _below_all_electrons(few, labels),
    )
    return [sentence for sentence in found if sentence]


def _close_contacts(frames: Sequence[Frame]) -> str | None:
    """Judge sign and size of the forces between atoms that are very close."""
    pushes, repulsions = [], []
    for atoms, forces, _ in frames:
        i, j, between, length = _close_pairs(atoms)
        pushes.append(0.5 * ((forces[j] - forces[i]) * between).sum(axis=1) / length)
        repulsions.append(screened_repulsion(atoms.numbers[i], atoms.numbers[j], length))
    push, repulsion = (np.concatenate([np.zeros(0), *parts]) for parts in (pushes, repulsions))
    if len(push) < LEAST_CONTACTS or np.median(np.abs(push)) < NOTICEABLE:
        return None
    if np.mean(push < 0) >= PULLED:
        return (
            f"of {len(push)} pairs of atoms that are closer than {CLOSE} times the sum of their "
            f"covalent radii {np.sum(push < 0)} are pulled together: forces of wrong sign?"
        )
    if np.median(push / repulsion) > STRONGEST:
        return (
            f"{len(push)} pairs of atoms that are very close repel each other much more than "
            "their nuclei do: are the forces in kcal/mol or kJ/mol?"
        )
    return None


def _close_pairs(atoms: Atoms) -> tuple[Array, Array, Array, Array]:
    """Find pairs i < j of very close atoms: i, j, r_j - r_i [n, 3] and its length [n], A."""
    radii = CLOSE * covalent_radii[atoms.numbers]
    cutoff = 2.0 * float(radii.max())
    i, j, between, length = search(atoms, cutoff, "ijDd")
    i, j = i.astype(np.int64), j.astype(np.int64)
    close = (i < j) & (length > 0) & (length < radii[i] + radii[j])
    return i[close], j[close], between[close], length[close]


def screened_repulsion(first: Array, second: Array, distance: Array) -> Array:
    """Compute the universal repulsion of nuclei with charges Z (ZBL), -dV/dr in eV/A, [n]."""
    length = 0.4685 / (first**0.23 + second**0.23)
    weight, decay = SCREENING.T
    parts = weight * np.exp(-decay * (distance / length)[:, None])  # [n, 4]
    slope = (parts * decay).sum(axis=1) / length
    return COULOMB * first * second * (parts.sum(axis=1) / distance + slope) / distance


def _below_all_electrons(structures: Sequence[Atoms], labels: Labels | None) -> str | None:
    for atoms in structures:
        if keys.ENERGY in available(atoms, labels):
            energy = float(extract(atoms, (keys.ENERGY,), labels)[keys.ENERGY])
            lowest = -float((THOMAS_FERMI * atoms.numbers ** (7 / 3) + BINDING).sum())
            if energy < lowest:
                return (
                    f"the energy of {atoms.get_chemical_formula()} is {energy:.4g} eV, and that of "
                    f"all its electrons above {lowest:.4g} eV: are energies in kcal/mol or kJ/mol?"
                )
    return None


def _series(structures: Sequence[Atoms], labels: Labels | None) -> list[list[Frame]]:
    """Return series of frames of the same atoms in the same order."""
    by_atoms: dict[tuple[int, ...], list[Frame]] = {}
    for atoms in structures:
        has = available(atoms, labels)
        if keys.FORCES not in has or not 2 <= len(atoms) <= MOST_ATOMS:
            continue
        values = extract(atoms, [name for name in has if name != keys.STRESS], labels)
        frame = Frame(atoms, values[keys.FORCES], float(values.get(keys.ENERGY, np.nan)))
        by_atoms.setdefault(tuple(atoms.numbers), []).append(frame)
    return list(by_atoms.values())


def _energies_against_forces(series: list[list[Frame]]) -> str | None:
    work, change = [], []
    for frames in series:
        near = pairwise(frames) if len(frames) > 30 else combinations(frames, 2)
        for first, second in near:
            if np.isnan(first.energy) or np.isnan(second.energy):
                continue
            move, turn = _displacement(first.atoms, second.atoms)
            if 0 < np.abs(move).max() <= LARGEST_MOVE:
                work.append(-0.5 * float(((first.forces + second.forces @ turn) * move).sum()))
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
    for known, unit in FACTORS.items():
        for value, who in ((known, "energies"), (1 / known, "forces")):
            if abs(np.log(factor / value)) < 0.1:
                return f"are the {who} in {unit}, the others in eV?"
    return "they are not in the same unit"


def _displacement(first: Atoms, second: Atoms) -> tuple[Array, Array]:
    """Return displacements [N, 3] after the best superposition, and its rotation [3, 3]."""
    if first.pbc.any():
        moved = second.positions - first.positions
        moved, _ = find_mic(moved, first.cell, first.pbc)  # pyright: ignore[reportArgumentType]
        return moved, np.eye(3)
    before, after = (r - r.mean(axis=0) for r in (first.positions, second.positions))
    u, _, v = np.linalg.svd(after.T @ before)
    turn = u @ np.diag([1.0, 1.0, np.sign(np.linalg.det(u @ v))]) @ v
    return after @ turn - before, turn


def _stiffness(series: list[list[Frame]]) -> str | None:
    """Fit k of each kind of bond, by regression of forces on distances around their means."""
    bonds: dict[tuple[int, int], list[Array]] = {}  # distances and pushes, [2, n]
    for frames in series:
        numbers = frames[0].atoms.numbers
        for i, j in _neighbours(frames[0].atoms):
            kind = (min(numbers[i], numbers[j]), max(numbers[i], numbers[j]))
            bond = np.array([_bond(frame, i, j) for frame in frames]).T
            # not where partners changed
            bond = bond[:, np.abs(bond[0] / np.median(bond[0]) - 1.0) < 0.3]
            if bond.size:
                bonds.setdefault(kind, []).append(bond - bond.mean(axis=1, keepdims=True))
    for kind, parts in bonds.items():
        x, y = np.concatenate(parts, axis=1)
        if len(x) < 3 * LEAST_FRAMES or not (x.std() > 1e-4 and y.std() > 0):
            continue
        k, correlation = -float(x @ y / (x @ x)), np.corrcoef(x, y)[0, 1]
        if problem := _judged(kind, k, correlation):
            return problem
    return None


def _judged(kind: tuple[int, int], k: float, correlation: float) -> str | None:
    bond = f"{chemical_symbols[kind[0]]}-{chemical_symbols[kind[1]]}"
    if correlation > BOND_CORRELATION:
        return f"{bond} bonds are pushed apart the more, the longer they are: forces of wrong sign?"
    if correlation > -BOND_CORRELATION:
        return None
    if k > STIFFEST:
        return (
            f"{bond} bonds have a stiffness of {k:.0f} eV/A^2, and none has more than 150: are the "
            "forces in kcal/mol or kJ/mol?"
        )
    if kind[0] == 1 and kind[1] in (6, 7, 8) and k < SOFTEST_WITH_HYDROGEN:
        return (
            f"{bond} bonds have a stiffness of {k:.2g} eV/A^2 in place of 25 to 50: are the forces "
            "in Hartree or Rydberg?"
        )
    return None


def _neighbours(atoms: Atoms) -> set[tuple[int, int]]:
    """Return each atom and its nearest neighbour."""
    distances = atoms.get_all_distances(mic=True)
    np.fill_diagonal(distances, np.inf)
    return {(min(i, int(j)), max(i, int(j))) for i, j in enumerate(distances.argmin(axis=1))}


def _bond(frame: Frame, i: int, j: int) -> tuple[float, float]:
    """Return the distance of two atoms, and the force that pushes them apart."""
    atoms, forces, _ = frame
    between: Any = atoms.get_distance(i, j, mic=bool(atoms.pbc.any()), vector=True)
    length = float(np.linalg.norm(between))
    return length, 0.5 * float((forces[j] - forces[i]) @ between) / length
