"""Structures for the error bars of released models, and for tests of them.

$BLIPS_DATA/mptrj/mptrj-random-1k.xyz: 1000 frames of MPtrj (CC-BY-4.0), as chosen for the benchmark
of MatterSim (MIT). Those of at most 60 atoms with elements that the model knows, in a seeded order:
100 are conditioned on, first one for every element that those before lack; the next 100 give the
scale, the rest is left for tests.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ase import Atoms

from blips.backbones.base import AtomisticBackbone, Backbone
from blips.data.structures import read_structures

SOURCE = "mptrj/mptrj-random-1k.xyz"
HOT = "mptrj/mpf-TP.xyz"  # high temperature and pressure
CONDITIONED, VALID, LARGEST = 100, 100, 60


class Split(NamedTuple):
    """Structures to condition on, to fit the scale on, and to test on."""

    conditioned: list[Atoms]
    valid: list[Atoms]
    test: list[Atoms]


def mptrj_split(folder: Path, backbone: Backbone) -> Split:
    """Load MPtrj for this model."""
    shuffled = _new_elements_first(_shuffled(read_structures(folder / SOURCE), backbone))
    rest = shuffled[CONDITIONED:]
    return Split(shuffled[:CONDITIONED], rest[:VALID], rest[VALID:])


def hot_structures(folder: Path, backbone: Backbone) -> list[Atoms]:
    """Load hot, dense crystals for this model."""
    return _shuffled(read_structures(folder / HOT), backbone)


def _new_elements_first(structures: list[Atoms]) -> list[Atoms]:
    """Sort structures: first those with an element that none before them has."""
    seen, first, others = set[int](), list[Atoms](), list[Atoms]()
    for atoms in structures:
        numbers = set(atoms.numbers.tolist())
        (others if numbers <= seen else first).append(atoms)
        seen |= numbers
    return first + others


def _shuffled(structures: Iterable[Atoms], backbone: Backbone) -> list[Atoms]:
    known = backbone.trained_numbers if isinstance(backbone, AtomisticBackbone) else None
    small = [
        atoms
        for atoms in structures
        if len(atoms) <= LARGEST and (known is None or known.issuperset(atoms.numbers.tolist()))
    ]
    return [small[k] for k in np.random.default_rng(0).permutation(len(small))]
