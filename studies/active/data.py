"""Labelled pools and test sets of the active-learning study.

| set | pool, from which the first labels come too | test |
|---|---|---|
| nh3 | half of the shipped geometries, near the minimum and far from it | the other half |
| acac | acetylacetone at 600 K, 500 geometries | 100 others at 600 K |
| si | silicon: bulk dynamics, strained cells, surfaces and vacancies, four fifths | a fifth |
"""

from collections.abc import Callable
from typing import NamedTuple

from ase import Atoms

from blips.data.ammonia import load_ammonia
from studies.errorbars.data import evenly, read_public


class PoolAndTest(NamedTuple):
    """Labelled structures to choose from, and others to judge by."""

    pool: list[Atoms]
    test: list[Atoms]


def _nh3() -> PoolAndTest:
    known = [atoms for part in ("train", "valid", "test_ood") for atoms in load_ammonia(part)]
    return PoolAndTest(known[::2], known[1::2])


def _acac() -> PoolAndTest:
    test = evenly(read_public("acac/test_MD_600K.xyz"), 100)
    return PoolAndTest(read_public("acac/train_600K.xyz"), test)


def _si() -> PoolAndTest:
    known = [a for part in ("train", "test") for a in read_public(f"mlearn/Si_{part}.extxyz")]
    known.sort(key=lambda atoms: atoms.info["group"])  # stable: every group is in both parts
    return PoolAndTest([a for k, a in enumerate(known) if k % 5], known[::5])


SETS: dict[str, Callable[[], PoolAndTest]] = {"nh3": _nh3, "acac": _acac, "si": _si}
