"""Geometries of the ammonia study: what is trained on, chosen on and tested on.

`shipped` is the data set of `blips.data.ammonia`. `public` are the files `train_78.extxyz` and
`attack_30a.extxyz` (energies in eV, forces in eV/A) in $BLIPS_DATA/ammonia, the NH3 geometries of
Schwalbe-Koda, Tan, Gomez-Bombarelli, "Differentiable sampling of molecular geometries with
uncertainty-based adversarial attacks" (2021).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from scipy.spatial.transform import Rotation

from blips.data.ammonia import load_ammonia
from blips.data.labels import extract
from blips.data.structures import read_structures
from blips.errors import InputError

COPY_DISTANCE = 1e-3  # A
ORIENTATION_SEED = 0
VALID_EVERY = 5


@dataclass(frozen=True)
class Data:
    """Geometries to train on, to choose and calibrate on, and to test on."""

    train: list[Atoms]
    valid: list[Atoms]
    test: list[Atoms]


def public_folder() -> Path | None:
    """Return the folder of the public geometries, $BLIPS_DATA/ammonia, where there is one."""
    root = os.environ.get("BLIPS_DATA")
    folder = Path(root) / "ammonia" if root else None
    return folder if folder is not None and folder.is_dir() else None


def load_data(settings: Mapping[str, Any]) -> Data:
    """Load the first geometries of a set.

    Validation geometries that are copies of training geometries are left out: the errors on them
    are no held-out errors. Test geometries are turned at random (always in the same way), see
    `turned`.

    Args:
        settings: `set`, "shipped", "public" or "inner" (training and validation data of "shipped",
            split by energy), and the largest numbers to `train`, `valid`, `test`.
    """
    if settings["set"] == "inner":
        return _inner(settings)
    if settings["set"] == "shipped":
        known, valid, test = (load_ammonia(part) for part in ("train", "valid", "test_ood"))
    else:
        folder = public_folder()
        if folder is None:
            raise InputError(
                "the public ammonia geometries are not there; set the environment variable "
                "BLIPS_DATA to a folder with ammonia/train_78.extxyz and ammonia/attack_30a.extxyz"
            )
        known = read_structures(folder / "train_78.extxyz")
        valid = known[settings["train"] :]
        test = read_structures(folder / "attack_30a.extxyz")
    train = known[: settings["train"]]
    held_out = without_copies(valid[: settings["valid"]], train)
    return Data(train, held_out, turned(test[: settings["test"]]))


def _inner(settings: Mapping[str, Any]) -> Data:
    """Split by energy: train and (every fifth) validate on the lower half, test on the upper."""
    known = [*load_ammonia("train"), *load_ammonia("valid")]
    known.sort(key=lambda atoms: float(extract(atoms)["energy"]))
    lower, upper = known[: len(known) // 2], known[len(known) // 2 :]
    train = [atoms for k, atoms in enumerate(lower) if k % VALID_EVERY]
    valid = lower[::VALID_EVERY]
    sizes = (settings[part] for part in ("train", "valid", "test"))
    return Data(*(part[:size] for part, size in zip((train, valid, upper), sizes, strict=True)))


def without_copies(structures: Sequence[Atoms], others: Sequence[Atoms]) -> list[Atoms]:
    """Drop ammonia geometries whose distances equal another's to within 0.001 A."""
    known = np.array([_distances(atoms) for atoms in others])  # [S, 6]
    return [
        atoms
        for atoms in structures
        if np.abs(known - _distances(atoms)).max(axis=1).min() > COPY_DISTANCE
    ]


def _distances(atoms: Atoms) -> np.ndarray:
    """Return the three N-H and the three H-H distances, each in ascending order, [6] A."""
    distances, hydrogen = atoms.get_all_distances(), atoms.numbers == 1
    between = distances[np.ix_(hydrogen, hydrogen)][np.triu_indices(3, k=1)]
    return np.concatenate([np.sort(distances[~hydrogen][0, hydrogen]), np.sort(between)])


def turned(structures: Sequence[Atoms], seed: int = ORIENTATION_SEED) -> list[Atoms]:
    """Rotate labelled molecules at random.

    Across a mirror plane that is normal to an axis, forces have a component that is exactly zero,
    and so is its deviation in some models but not in others. Components of no physical content
    would decide the NLL; in a general orientation there are none.
    """
    random = np.random.default_rng(seed)
    rotations = Rotation.random(len(structures), random).as_matrix()  # [S, 3, 3]
    found = []
    for atoms, rotation in zip(structures, rotations, strict=True):
        labels = extract(atoms)
        copy = atoms.copy()
        copy.positions = atoms.positions @ rotation.T
        copy.calc = SinglePointCalculator(
            copy, energy=float(labels["energy"]), forces=labels["forces"] @ rotation.T
        )
        found.append(copy)
    return found
