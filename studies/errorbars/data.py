"""Structures of the study of error bars: near the training data, and away from it.

| set | trained on | near | far |
|---|---|---|---|
| nh3 | 64 shipped geometries, 0-5 kcal/mol | 14 more of the same kind | 129, 5-70 kcal/mol |
| nh3-public | first 64 of `train_78` | the other 14 (validation data) | 30, `attack_30a` |
| acac-100, acac-450 | acetylacetone at 300 K | 300 of `test_MD_300K` | 300 of `test_MD_600K` |
| ethanol | first 100 of `train` | 300 of `test_MD` | 60, hydrogen pulled off (energies) |
| si, ge, li | mlearn: bulk dynamics, strained cells | a fifth of these | surfaces, vacancies |

Validation structures are near ones that are neither trained nor tested on. All but `nh3` are read
from $BLIPS_DATA.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from ase import Atoms

from blips.data.ammonia import load_ammonia
from blips.data.structures import read_structures
from blips.errors import InputError
from studies.ammonia.data import turned, without_copies

FAR_GROUPS = ("Surface", "Vacancy")
Item = TypeVar("Item")
TESTED = 300  # structures of a long trajectory


@dataclass(frozen=True)
class NearFar:
    """Structures to train on, to choose and calibrate on, and to test on."""

    train: list[Atoms]
    valid: list[Atoms]
    near: list[Atoms]
    far: list[Atoms]


def load_set(name: str) -> NearFar:
    """Load the set of that name."""
    if name not in SETS:
        raise InputError(f"no set {name!r}; use one of {', '.join(SETS)}")
    return SETS[name]()


def data_folder() -> Path | None:
    """Return the folder of the public data, $BLIPS_DATA, where there is one."""
    root = os.environ.get("BLIPS_DATA")
    return Path(root) if root and Path(root).is_dir() else None


def read_public(path: str) -> list[Atoms]:
    """Read the structures of a file in $BLIPS_DATA."""
    folder = data_folder()
    if folder is None or not (folder / path).exists():
        raise InputError(f"set the environment variable BLIPS_DATA to a folder with {path}")
    return read_structures(folder / path)


def evenly(structures: Sequence[Item], count: int) -> list[Item]:
    """Return `count` of them, evenly spaced."""
    places = np.linspace(0, len(structures) - 1, min(count, len(structures))).round()
    return [structures[int(k)] for k in places]


def _nh3() -> NearFar:
    known = load_ammonia("train")
    far = turned(load_ammonia("test_ood"))
    return NearFar(known[:64], load_ammonia("valid"), turned(known[64:]), far)


def _nh3_public() -> NearFar:
    known = read_public("ammonia/train_78.extxyz")
    valid = without_copies(known[64:], known[:64])
    return NearFar(
        known[:64], valid, turned(valid), turned(read_public("ammonia/attack_30a.extxyz"))
    )


def _acac(count: int) -> NearFar:
    cold = read_public("acac/train_300K.xyz")
    near, far = (read_public(f"acac/test_MD_{t}K.xyz") for t in (300, 600))
    return NearFar(cold[:count], cold[-50:], evenly(near, TESTED), evenly(far, TESTED))


def _ethanol() -> NearFar:
    known, near = read_public("ethanol/train.xyz"), read_public("ethanol/test_MD.xyz")
    far = read_public("ethanol/test_H_removal.xyz")
    return NearFar(known[:100], known[-50:], evenly(near, TESTED), far)


def _mlearn(element: str) -> NearFar:
    everything = [
        a for part in ("train", "test") for a in read_public(f"mlearn/{element}_{part}.extxyz")
    ]
    far = [atoms for atoms in everything if atoms.info["group"] in FAR_GROUPS]
    known = [atoms for atoms in everything if atoms.info["group"] not in FAR_GROUPS]
    order = np.random.default_rng(0).permutation(len(known))
    fifth = len(known) // 5
    first, second = fifth, fifth + fifth // 2
    parts = {"near": order[:first], "valid": order[first:second], "train": order[second:]}
    picked = {name: [known[k] for k in part] for name, part in parts.items()}
    return NearFar(**picked, far=far)


SETS: dict[str, Callable[[], NearFar]] = {
    "nh3": _nh3,
    "nh3-public": _nh3_public,
    "acac-100": lambda: _acac(100),
    "acac-450": lambda: _acac(450),
    "ethanol": _ethanol,
    "si": lambda: _mlearn("Si"),
    "ge": lambda: _mlearn("Ge"),
    "li": lambda: _mlearn("Li"),
}
