"""Structures of the MatPES study: what is known at first, the pool, and the test set.

The structures are a MatPES release (JSON, see `blips.data.matpes`) where the user has one, any
labelled file that ASE reads, or one of two sets made of files in $BLIPS_DATA/mptrj:

| name | what it is |
|---|---|
| mptrj | `mptrj-random-1k.xyz`, random structures of the Materials Project's relaxations |
| hot | these, and a third as many of `mpf-TP.xyz`: high temperature and pressure |
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes
from ase.io import write

from blips.active.frames import digest
from blips.data.labels import extract
from blips.data.matpes import iter_matpes
from blips.data.structures import iter_structures, read_structures, replacing
from blips.errors import InputError

MPTRJ, HOT = "mptrj/mptrj-random-1k.xyz", "mptrj/mpf-TP.xyz"
SETS: dict[str, dict[str, str]] = {"mptrj": {"mptrj": MPTRJ}, "hot": {"mptrj": MPTRJ, "hot": HOT}}
"""Files of each set by what their structures are called."""

HOT_SHARE = 1 / 3  # hot structures for each of the others
TEST_SEED = 0
PARTS = ("initial", "pool", "test")
KIND = "blips_kind"  # in atoms.info: what a structure of a set is called


@dataclass(frozen=True)
class Parts:
    """Files of one run, and the structures to test on: all, and by kind where there are several."""

    initial: Path
    pool: Path
    test: list[Atoms]

    @property
    def kinds(self) -> dict[str, list[Atoms]]:
        """Test structures of each kind, of a set of several."""
        names = sorted({kind_of(atoms) for atoms in self.test})
        if len(names) < 2:
            return {}
        return {name: [a for a in self.test if kind_of(a) == name] for name in names}


def kind_of(atoms: Atoms) -> str:
    """What a structure of a set is called; of a file of its own: "structure"."""
    return atoms.info.get(KIND, "structure")


def data_files(data: str) -> dict[str, Path]:
    """The files of a set in $BLIPS_DATA by kind, or the one file that is given."""
    files = {"structure": Path(data)}
    if data in SETS:
        root = os.environ.get("BLIPS_DATA")
        if root is None:
            raise InputError(
                "the MatPES study needs structures; give data=FILE, a MatPES release (JSON) or any "
                f"labelled file that ASE reads, or set BLIPS_DATA to the folder that has {MPTRJ}"
            )
        files = {kind: Path(root) / path for kind, path in SETS[data].items()}
    for path in files.values():
        if not path.is_file():
            raise InputError(
                f"there is no file {path}; give data=FILE, data={' or data='.join(SETS)}, "
                "or set BLIPS_DATA"
            )
    return files


def write_parts(settings: Mapping[str, Any], seed: int, folder: Path) -> Parts:
    """Draw the parts of a run and write those that a campaign reads.

    The test set is the same for all seeds; known structures and pool are drawn from the rest.

    Args:
        settings: `name` (of a set, or a file), `max_atoms`, and the numbers `initial`, `pool`,
            `test`.
        seed: of known structures and pool.
        folder: for the files.
    """
    sizes = [settings[part] for part in PARTS]
    structures = read_all(settings["name"], settings["max_atoms"])
    if len(structures) < sum(sizes):
        raise InputError(
            f"{len(structures)} structures of at most {settings['max_atoms']} atoms; "
            f"{sum(sizes)} are needed"
        )
    order = np.random.default_rng(TEST_SEED).permutation(len(structures))
    test, rest = order[: settings["test"]], order[settings["test"] :]
    rest = np.random.default_rng([seed, 1]).permutation(rest)
    paths = {part: folder / f"{part}.extxyz" for part in PARTS[:2]}
    first = settings["initial"]
    chosen = {"initial": rest[:first], "pool": rest[first : first + settings["pool"]]}
    for part, path in paths.items():
        if not path.exists():
            with replacing(path) as temporary:
                write(temporary, [structures[i] for i in chosen[part]], format="extxyz")
    return Parts(paths["initial"], paths["pool"], [structures[i] for i in test])


def read_all(data: str, max_atoms: int) -> list[Atoms]:
    """All structures of at most so many atoms; of hot ones a share, the same for all seeds."""
    found: dict[str, list[Atoms]] = {}
    for kind, path in data_files(data).items():
        names = "".join(path.suffixes).lower()
        read = iter_matpes(path) if ".json" in names else iter_structures(path)
        found[kind] = [atoms for atoms in read if len(atoms) <= max_atoms]
        for atoms in found[kind]:
            atoms.info[KIND] = kind
    if "hot" in found:
        order = np.random.default_rng(TEST_SEED).permutation(len(found["hot"]))
        count = int(HOT_SHARE * len(found["mptrj"]))
        found["hot"] = [found["hot"][i] for i in order[:count]]
    return [atoms for structures in found.values() for atoms in structures]


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
        """Take the labels of this very geometry."""
        super().calculate(atoms, properties, system_changes)
        if atoms is None or (name := digest(atoms)) not in self._labels:
            raise InputError("this structure is not among the labelled ones")
        found = self._labels[name]
        self.results = {"energy": float(found["energy"]), "forces": np.asarray(found["forces"])}
