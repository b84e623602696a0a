"""Structures of the silica study: zeolites of known and of new topologies.

`$BLIPS_DATA/silica` holds four extxyz files with energies (eV) and forces (eV/A) at PBE-D3(BJ):
`train_1024`, `valid_256` and `test_same_topologies_300` are of five framework types,
`test_new_topologies_300` is of five others. All are snapshots of molecular dynamics.

| part | from | what it is for |
|---|---|---|
| train | the first of `train_1024`, so that a smaller set is part of every larger one | training |
| valid | the first of `valid_256` | the best epoch, and choices of settings |
| calibration | those of `valid_256` that come next | the scale of the error bars |
| known, new | the first of the two test sets | the tables, nothing else |
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ase import Atoms

from blips.data.structures import check_structures, read_structures
from blips.errors import InputError

TESTS = ("known", "new")
FILES = {
    "train": "train_1024.extxyz",
    "valid": "valid_256.extxyz",
    "known": "test_same_topologies_300.extxyz",
    "new": "test_new_topologies_300.extxyz",
}


@dataclass(frozen=True)
class Data:
    """Structures to train on, to choose on, to calibrate on, and to test on, by kind of test."""

    train: list[Atoms]
    valid: list[Atoms]
    calibration: list[Atoms]
    tests: dict[str, list[Atoms]]


def folder() -> Path:
    """Return the folder of the files, $BLIPS_DATA/silica."""
    root = os.environ.get("BLIPS_DATA")
    path = Path(root) / "silica" if root else None
    if path is None or not path.is_dir():
        raise InputError(
            "the silica study needs its structures; set BLIPS_DATA to the folder that has "
            f"silica/{FILES['train']} and the others"
        )
    return path


def load_data(sizes: Mapping[str, int]) -> Data:
    """Load the first structures of every part.

    Args:
        sizes: how many of `train`, `valid`, `calibration`, `known` and `new`.
    """
    held_out = _first("valid", sizes["valid"] + sizes["calibration"])
    return Data(
        _first("train", sizes["train"]),
        held_out[: sizes["valid"]],
        held_out[sizes["valid"] :],
        {name: _first(name, sizes[name]) for name in TESTS},
    )


def _first(part: str, count: int) -> list[Atoms]:
    path = folder() / FILES[part]
    structures = check_structures(read_structures(path, slice(count)), path)
    if len(structures) < count:
        raise InputError(f"{path} has {len(structures)} structures; {count} are asked for")
    return structures
