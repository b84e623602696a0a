"""Structures of the MatPES study: what is known at first, the pool, and the test set.

The structures are a MatPES release (JSON, see `blips.data.matpes`) where the user has one, or any
labelled file that ASE reads; by default `mptrj-random-1k.xyz` in $BLIPS_DATA/mptrj, a thousand
random structures of the Materials Project's relaxations with 85 elements.
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

DEFAULT = "mptrj/mptrj-random-1k.xyz"
TEST_SEED = 0
PARTS = ("initial", "pool", "test")


@dataclass(frozen=True)
class Parts:
    """Files of one run, and the structures to test on."""

    initial: Path
    pool: Path
    test: list[Atoms]


def data_file(path: str | None = None) -> Path:
    """The file of all structures: the one that is given, or the default in $BLIPS_DATA."""
    root = os.environ.get("BLIPS_DATA")
    if path is None and root is None:
        raise InputError(
            "the MatPES study needs structures; give data=FILE, a MatPES release (JSON) or any "
            f"labelled file that ASE reads, or set BLIPS_DATA to the folder that has {DEFAULT}"
        )
    found = Path(path) if path is not None else Path(root or "") / DEFAULT
    if not found.is_file():
        raise InputError(f"there is no file {found}; give data=FILE, or set BLIPS_DATA")
    return found


def write_parts(settings: Mapping[str, Any], seed: int, folder: Path) -> Parts:
    """Draw the parts of a run and write those that a campaign reads.

    The test set is the same for all seeds; known structures and pool are drawn from the rest.

    Args:
        settings: `file`, `max_atoms`, and the numbers `initial`, `pool`, `test`.
        seed: of known structures and pool.
        folder: for the files.
    """
    sizes = [settings[part] for part in PARTS]
    structures = _read(data_file(settings["file"]), settings["max_atoms"])
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


def _read(path: Path, max_atoms: int) -> list[Atoms]:
    names = "".join(path.suffixes).lower()
    found = iter_matpes(path) if ".json" in names else iter_structures(path)
    return [atoms for atoms in found if len(atoms) <= max_atoms]


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
