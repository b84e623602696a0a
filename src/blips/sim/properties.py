"""Uncertainties beside ASE's own properties.

ASE writes those calculator results that it knows by name. Uncertainties are therefore also kept on
the structure, `atoms.info` and `atoms.arrays`, where every format of ASE that has room for them
(extxyz, traj, db) finds them: the same keys as in the files that `blips predict` writes.
"""

from collections.abc import Mapping
from typing import Any

from ase import Atoms
from ase.calculators.calculator import all_properties
from ase.calculators.singlepoint import SinglePointCalculator

from blips import keys

PER_STRUCTURE = (keys.ENERGY_UNCERTAINTY, keys.STRESS_UNCERTAINTY)
PER_ATOM = (keys.ENERGIES_UNCERTAINTY, keys.FORCES_UNCERTAINTY)
UNCERTAINTIES = (*PER_STRUCTURE, *PER_ATOM)


def annotate(atoms: Atoms, results: Mapping[str, Any]) -> None:
    """Keep these uncertainties on the structure, and no older ones."""
    for store, names in ((atoms.info, PER_STRUCTURE), (atoms.arrays, PER_ATOM)):
        for name in names:
            store.pop(name, None)
            if name in results:
                store[name] = results[name]


def snapshot(atoms: Atoms) -> Atoms:
    """Copy a structure with the results of its calculator, as far as they belong to it."""
    frame = atoms.copy()
    calculator = atoms.calc
    results: dict[str, Any] = {}
    if calculator is not None and not calculator.check_state(atoms):
        results = calculator.results
    known = {name: value for name, value in results.items() if name in all_properties}
    frame.calc = SinglePointCalculator(frame, **known)
    annotate(frame, results)
    return frame
