"""Labelled pools and test sets of the active-learning study.

| set | pool, from which the first labels come too | test |
|---|---|---|
| nh3 | half of the shipped geometries, near the minimum and far from it | the other half |
| xtb | ammonia by GFN2-xTB, 300 frames of dynamics at 300, 1000 and 2000 K | 60 others |
| acac | acetylacetone at 600 K, 500 geometries | 100 others at 600 K |
| si | silicon: bulk dynamics, strained cells, surfaces and vacancies, four fifths | a fifth |
| hot | crystals at high temperature and pressure, 120 snapshots of 60 compounds | another snapshot of each |
| mptrj | 120 random structures of the Materials Project's relaxations | 60 others |
| silica | zeolites: dynamics of five known frameworks and of five new ones, 60 frames each | 50 other frames of the new ones |
"""  # noqa: E501 (table)

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from ase import Atoms, units
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.md.langevin import Langevin

from blips.data.ammonia import load_ammonia
from blips.sim.reference import make_calculator
from studies.errorbars.data import evenly, read_public
from studies.matpes.data import divide


class PoolAndTest(NamedTuple):
    """Labelled structures to choose from, and others to judge by."""

    pool: list[Atoms]
    test: list[Atoms]


def _nh3() -> PoolAndTest:
    known = [atoms for part in ("train", "valid", "test_ood") for atoms in load_ammonia(part)]
    return PoolAndTest(known[::2], known[1::2])


def _xtb() -> PoolAndTest:
    """Run dynamics by GFN2-xTB, 120 frames at each temperature, 10 fs apart."""
    calculator, frames = make_calculator("gfn2-xtb"), []
    for number, temperature in enumerate((300.0, 1000.0, 2000.0)):
        rng = np.random.default_rng([number, 27])
        atoms = molecule("NH3")
        atoms.calc = calculator
        width = np.sqrt(atoms.get_masses() * units.kB * temperature)
        atoms.set_momenta(width[:, None] * rng.standard_normal((4, 3)))
        dynamics = Langevin(
            atoms,
            0.5 * units.fs,
            temperature_K=temperature,
            friction=0.02 / units.fs,
            fixcm=False,
            rng=rng,
        )
        for _ in range(120):
            dynamics.run(20)
            frame = atoms.copy()
            results = {name: atoms.calc.results[name] for name in ("energy", "forces")}
            frame.calc = SinglePointCalculator(frame, **results)
            frames.append(frame)
    return PoolAndTest([a for k, a in enumerate(frames) if k % 6], frames[::6])


def _acac() -> PoolAndTest:
    test = evenly(read_public("acac/test_MD_600K.xyz"), 100)
    return PoolAndTest(read_public("acac/train_600K.xyz"), test)


def _si() -> PoolAndTest:
    known = [a for part in ("train", "test") for a in read_public(f"mlearn/Si_{part}.extxyz")]
    known.sort(key=lambda atoms: atoms.info["group"])  # stable: every group is in both parts
    return PoolAndTest([a for k, a in enumerate(known) if k % 5], known[::5])


def _released(name: str) -> PoolAndTest:
    """Take small cells, which a released model is fine-tuned to on one core."""
    test, rest = divide(name, max_atoms=10, count=60)
    return PoolAndTest(evenly(rest, 120), test)


def _silica() -> PoolAndTest:
    new = read_public("silica/test_new_topologies_300.extxyz")
    known = read_public("silica/test_same_topologies_300.extxyz")
    return PoolAndTest(evenly(known, 60) + evenly(new[::2], 60), evenly(new[1::2], 50))


SETS: dict[str, Callable[[], PoolAndTest]] = {
    "nh3": _nh3,
    "xtb": _xtb,
    "acac": _acac,
    "si": _si,
    "hot": partial(_released, "hot"),
    "mptrj": partial(_released, "mptrj"),
    "silica": _silica,
}
