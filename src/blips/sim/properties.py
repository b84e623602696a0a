"""Uncertainties as properties that ASE knows.

ASE writes to files, and takes from them, the calculator results on its lists alone. `register`
adds the uncertainties to these lists, so that `ase.io.write("out.extxyz", atoms)` keeps them and
`ase.io.read` gives them back in `atoms.calc.results`.
"""

import ase.io.extxyz
import ase.outputs
from ase.calculators.calculator import all_properties

from blips import keys

PER_STRUCTURE = {keys.ENERGY_UNCERTAINTY: (), keys.STRESS_UNCERTAINTY: (6,)}
PER_ATOM = {keys.ENERGIES_UNCERTAINTY: ("natoms",), keys.FORCES_UNCERTAINTY: ("natoms", 3)}
UNCERTAINTIES = (*PER_STRUCTURE, *PER_ATOM)


def register() -> None:
    """Add the uncertainties to ASE's lists; again does nothing."""
    for name, shape in {**PER_STRUCTURE, **PER_ATOM}.items():
        if name not in ase.outputs.all_outputs:
            ase.outputs._defineprop(name, float, shape=shape)
        if name not in all_properties:
            all_properties.append(name)
    lists = (
        (ase.io.extxyz.per_config_properties, PER_STRUCTURE),
        (ase.io.extxyz.per_atom_properties, PER_ATOM),
    )
    for known, names in lists:
        known.extend(name for name in names if name not in known)
