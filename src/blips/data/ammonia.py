"""Ammonia: the shipped NH3 data set, with labels of BP86-D3(BJ)/def2-SVP (`blips.sim.pyscf`)."""

from importlib import resources
from typing import Literal, get_args

from ase import Atoms

from blips.data.structures import read_structures
from blips.errors import refuse_unknown

AmmoniaSplit = Literal["train", "valid", "test_ood"]

MINIMUM_ENERGY = -1537.735001  # eV, total energy of the optimised pyramid at this level


def load_ammonia(split: AmmoniaSplit) -> list[Atoms]:
    """Read one split of the shipped NH3 data set.

    These are "train" (78 geometries, 0-5 kcal/mol above the minimum), "valid" (14 of the same kind)
    and "test_ood" (129 distorted ones, 5-70 kcal/mol). A `SinglePointCalculator` holds `energy`
    (eV, relative to the minimum) and `forces` (eV/A); `info["kind"]` says how a geometry was made.
    """
    refuse_unknown("ammonia split", split, get_args(AmmoniaSplit))
    source = resources.files("blips.data") / "files" / f"nh3_{split}.extxyz"
    with resources.as_file(source) as path:
        return read_structures(path)
