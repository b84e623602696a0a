"""Structures of the study of fast error bars: NH3, quartz and silica, near the data and far from it.

| kind | lessons | near | far |
|---|---|---|---|
| nh3 | shipped training geometries | others of the same kind, which no weights were fitted to | shipped distorted ones, 5-70 kcal/mol |
| quartz | displaced by 0.05 A | the same, other displacements | displaced by 0.25 A |
| silica | frames of MD of zeolites | other frames | other frames, displaced by 0.25 A |

Silica needs `$BLIPS_DATA/silica` and is left out elsewhere. Zeolites for a PaiNN that was trained
on silica are of the topologies that it was trained on (24 atoms), for others EDI (15 atoms).
"""  # noqa: E501

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.spacegroup import crystal
from scipy.spatial.transform import Rotation

from blips.data.ammonia import load_ammonia
from blips.data.structures import read_structures
from blips.experiments.demo import NUM_TRAIN
from blips.prediction import Array

NEAR, FAR = 0.05, 0.25  # displacements, A
SILICA = {"edi": "test_new_topologies_300.extxyz", "dft": "test_same_topologies_300.extxyz"}


class Case(NamedTuple):
    """A structure of the study."""

    kind: str  # "nh3", "quartz" or "silica"
    number: int
    atoms: Atoms


@dataclass(frozen=True)
class Sets:
    """Structures to learn one-pass forces from, and to compare on."""

    lessons: list[Atoms]
    near: list[Case]
    far: list[Case]


class Counts(NamedTuple):
    """Structures in each set: NH3, and each of quartz and silica."""

    molecules: int = 8
    crystals: int = 2


def quartz(std: float, seed: int) -> Atoms:
    """Alpha quartz, 9 atoms, every coordinate displaced by N(0, std^2)."""
    cell = crystal(
        ["Si", "O"],
        [(0.4697, 0, 1 / 3), (0.4133, 0.2672, 0.2144)],
        spacegroup=152,
        cellpar=[4.9137, 4.9137, 5.4047, 90, 90, 120],
    )
    return displaced(Atoms(cell.numbers, cell.positions, cell=cell.cell, pbc=True), std, seed)


def displaced(atoms: Atoms, std: float, seed: int) -> Atoms:
    """A copy with every coordinate displaced by N(0, std^2), A."""
    moved = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
    moved.positions += np.random.default_rng(seed).normal(scale=std, size=moved.positions.shape)
    return moved


def turned(molecules: Sequence[Atoms], copies: int, seed: int) -> list[Atoms]:
    """Copies of each, with energy and forces, all in random orientations of their own."""
    quaternions = np.random.default_rng(seed).normal(size=(copies * len(molecules), 4))
    turns = Rotation.from_quat(quaternions).as_matrix()  # uniform over all rotations
    return [_turned(a, turn) for a, turn in zip([*molecules] * copies, turns, strict=True)]


def _turned(atoms: Atoms, turn: Array) -> Atoms:
    """With positions and forces times the orthogonal matrix `turn`."""
    moved = Atoms(atoms.numbers, atoms.positions @ turn.T)
    energy, forces = atoms.get_potential_energy(), atoms.get_forces() @ turn.T
    moved.calc = SinglePointCalculator(moved, energy=energy, forces=forces)
    return moved


def ammonia_sets(counts: Counts) -> Sets:
    """Shipped NH3; lessons are among the geometries that the demo trains on."""
    count = counts.molecules
    known, far = _plain(load_ammonia("train")), _plain(load_ammonia("test_ood"))
    return Sets(
        known[: max(4, count)] if count else [],
        _numbered("nh3", (known[NUM_TRAIN:] + _plain(load_ammonia("valid")))[:count]),
        _numbered("nh3", _shuffled(far)[:count]),
    )


def crystal_sets(counts: Counts, topology: str = "edi") -> Sets:
    """Quartz, and zeolites where the data are there."""
    count = counts.crystals
    if count == 0:
        return Sets([], [], [])
    frames = silica(topology)
    near, lessons = frames[:count], frames[-count:]
    return Sets(
        [quartz(NEAR, k) for k in range(max(2, count))] + _plain(lessons),
        _numbered("quartz", [quartz(NEAR, 100 + k) for k in range(count)])
        + _numbered("silica", _plain(near)),
        _numbered("quartz", [quartz(FAR, 200 + k) for k in range(count)])
        + _numbered("silica", [displaced(a, FAR, 300 + k) for k, a in enumerate(near)]),
    )


def mixed_sets(counts: Counts) -> Sets:
    """All kinds, for models that know all elements."""
    a, b = ammonia_sets(counts), crystal_sets(counts)
    return Sets(a.lessons[:4] + b.lessons, a.near + b.near, a.far + b.far)


def silica(topology: str) -> list[Atoms]:
    """Frames of a topology in the test sets, in no order; none where the data are not there."""
    folder = os.environ.get("BLIPS_DATA")
    path = Path(folder or ".") / "silica" / SILICA[topology]
    if not folder or not path.exists():
        return []
    return _shuffled([a for a in read_structures(path) if a.info.get("topology") == topology])


def _plain(structures: list[Atoms]) -> list[Atoms]:
    """Copies without labels."""
    return [displaced(atoms, 0.0, 0) for atoms in structures]


def _shuffled(structures: list[Atoms]) -> list[Atoms]:
    """So that the first few are of all sorts; a larger set has the smaller one's first."""
    return [structures[k] for k in np.random.default_rng(0).permutation(len(structures))]


def _numbered(kind: str, structures: list[Atoms]) -> list[Case]:
    return [Case(kind, number, atoms) for number, atoms in enumerate(structures)]


MakeSets = Callable[[Counts], Sets]
