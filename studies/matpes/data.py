"""Structures of the MatPES study: what is known at first, the pool, and the test set.

The structures are a MatPES release (JSON, see `studies.matpes.release`) where the user has one, any
labelled file that ASE reads, or one of two sets of $BLIPS_DATA/mptrj:

| name | what it is |
|---|---|
| hot | `mpf-TP.xyz`: compounds at high temperature and pressure, some snapshots of each |
| mptrj | `mptrj-random-1k.xyz`: random structures of the Materials Project's relaxations |

Of hot compounds all parts have the same ones, and the test set one snapshot of each: what is
labelled can teach what is tested. In the other sets hardly any compound is there twice.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes
from ase.io import write

from blips.active.frames import digest
from blips.data.labels import extract
from blips.data.structures import iter_structures, read_structures
from blips.errors import InputError
from blips.files import replacing
from studies.matpes.release import iter_matpes

SETS = {"hot": "mptrj/mpf-TP.xyz", "mptrj": "mptrj/mptrj-random-1k.xyz"}
BY_COMPOUND = ("hot",)
TEST_SEED = 0
PARTS = ("initial", "pool", "test")

Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Parts:
    """Files of one run, and the structures to test on."""

    initial: Path
    pool: Path
    test: list[Atoms]


def data_file(data: str) -> Path:
    """Return the file of a set in $BLIPS_DATA, or the one that is given."""
    path = Path(data)
    if data in SETS:
        root = os.environ.get("BLIPS_DATA")
        if root is None:
            raise InputError(
                "the MatPES study needs structures; give data=FILE, a MatPES release (JSON) or any "
                "labelled file that ASE reads, or set BLIPS_DATA to the folder that has "
                f"{SETS[data]}"
            )
        path = Path(root) / SETS[data]
    if not path.is_file():
        raise InputError(
            f"there is no file {path}; give data=FILE, data={' or data='.join(SETS)}, "
            "or set BLIPS_DATA"
        )
    return path


def write_parts(settings: Mapping[str, Any], seed: int, folder: Path) -> Parts:
    """Draw the parts of a run and write those that a campaign reads.

    The test set is the same for all seeds; known structures and pool are drawn from the rest.

    Args:
        settings: `name` (of a set, or a file), `max_atoms`, and the numbers `initial`, `pool`,
            `test`.
        seed: of known structures and pool.
        folder: for the files.
    """
    test, rest = divide(settings["name"], settings["max_atoms"], settings["test"])
    needed = settings["initial"] + settings["pool"]
    if len(test) < settings["test"] or len(rest) < needed:
        raise InputError(
            f"{len(test)} structures of at most {settings['max_atoms']} atoms to test and "
            f"{len(rest)} others; {settings['test']} and {needed} are needed"
        )
    order = np.random.default_rng([seed, 1]).permutation(len(rest))
    paths = {part: folder / f"{part}.extxyz" for part in PARTS[:2]}
    first = settings["initial"]
    chosen = {"initial": order[:first], "pool": order[first : first + settings["pool"]]}
    for part, path in paths.items():
        if not path.exists():
            with replacing(path) as temporary:
                write(temporary, [rest[i] for i in chosen[part]], format="extxyz")
    return Parts(paths["initial"], paths["pool"], test)


def divide(name: str, max_atoms: int, count: int) -> tuple[list[Atoms], list[Atoms]]:
    """Return so many test structures of a set, of at most `max_atoms`, and those to learn from."""
    structures = _read(data_file(name), max_atoms)
    split = _one_of_each_compound if name in BY_COMPOUND else _at_random
    test, rest = split(structures, count)
    return [structures[i] for i in test], [structures[i] for i in rest]


def _read(path: Path, max_atoms: int) -> list[Atoms]:
    names = "".join(path.suffixes).lower()
    found = iter_matpes(path) if ".json" in names else iter_structures(path)
    return [atoms for atoms in found if len(atoms) <= max_atoms]


def _at_random(structures: Sequence[Atoms], count: int) -> tuple[Indices, Indices]:
    """Split off so many structures at random."""
    order = np.random.default_rng(TEST_SEED).permutation(len(structures))
    return order[:count], order[count:]


def _one_of_each_compound(structures: Sequence[Atoms], count: int) -> tuple[Indices, Indices]:
    """Return a structure of each of so many compounds, and the compounds' other structures."""
    compounds: dict[str, list[int]] = {}
    for i, atoms in enumerate(structures):
        compounds.setdefault(atoms.get_chemical_formula(empirical=True), []).append(i)
    several = [found for _, found in sorted(compounds.items()) if len(found) > 1]
    order = np.random.default_rng(TEST_SEED).permutation(len(several))[:count]
    chosen = [several[k] for k in order]
    rest = [i for _, *others in chosen for i in others]
    return np.array([first for first, *_ in chosen], int), np.array(rest, int)


class KnownLabels(Calculator):
    """A calculator that looks labels up: what a campaign asks where all of its pool is labelled.

    Args:
        files: labelled structures.
    """

    implemented_properties = ["energy", "forces"]  # noqa: RUF012 (ASE's declaration)

    def __init__(self, files: list[str]) -> None:
        super().__init__()
        self._labels = {
            digest(atoms): extract(atoms, ("energy", "forces"))
            for file in files
            for atoms in read_structures(file)
        }

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: list[str] | None = None,
        system_changes: list[str] = all_changes,
    ) -> None:
        """Look up the labels of this geometry."""
        super().calculate(atoms, properties, system_changes)
        if atoms is None or (name := digest(atoms)) not in self._labels:
            raise InputError("this structure is not among the labelled ones")
        found = self._labels[name]
        self.results = {"energy": float(found["energy"]), "forces": np.asarray(found["forces"])}
