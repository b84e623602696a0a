"""Labels of a structure: where they are found and in which units; eV and A come out.

    energy [eV] = energy_unit * energy
    forces [eV/A] = energy_unit / length_unit * forces
    stress [eV/A^3] = energy_unit / length_unit^3 * stress

Stress has ASE's sign (dE/dstrain / V, positive under tension) and, where it is given as six
numbers, ASE's order (xx, yy, zz, yz, xz, xy). A structure without "energy" but with "REF_energy",
as MACE names its labels, has that energy; the same holds for forces and stress.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import compare_atoms
from ase.stress import voigt_6_to_full_3x3_stress

from blips import keys
from blips.errors import InputError, refuse_unknown
from blips.units import ENERGY_UNITS, LENGTH_UNITS

QUANTITIES = (keys.ENERGY, keys.FORCES, keys.STRESS)
MACE_PREFIX = "REF_"
UNITS = {keys.ENERGY: "eV", keys.FORCES: "eV/A", keys.STRESS: "eV/A^3"}
LARGEST = 1e9  # eV, eV/A, eV/A^3: no label of a structure that anybody computes


@dataclass(frozen=True)
class Labels:
    """Names and units of the labels in a file.

    Names are those in the calculator's results, `atoms.info` or `atoms.arrays`. Positions and cells
    are always in A, as ASE reads them.
    """

    energy_key: str = "energy"
    forces_key: str = "forces"
    stress_key: str = "stress"
    energy_unit: str = "eV"  # of the energy, and of the energy in forces and stress
    length_unit: str = "A"  # of the length in forces and stress

    def __post_init__(self) -> None:
        for unit, known in ((self.energy_unit, ENERGY_UNITS), (self.length_unit, LENGTH_UNITS)):
            refuse_unknown("unit of labels", unit, known)

    def key(self, quantity: str) -> str:
        """Return the name under which "energy", "forces" or "stress" is stored."""
        refuse_unknown("label", quantity, QUANTITIES)
        return getattr(self, f"{quantity}_key")

    def factor(self, quantity: str) -> float:
        """Return the factor that turns a stored quantity into eV, eV/A or eV/A^3."""
        power = {keys.ENERGY: 0, keys.FORCES: 1, keys.STRESS: 3}[quantity]
        return ENERGY_UNITS[self.energy_unit] / LENGTH_UNITS[self.length_unit] ** power


def extract(
    atoms: Atoms,
    quantities: Sequence[str] = (keys.ENERGY, keys.FORCES),
    labels: Labels | None = None,
) -> dict[str, np.ndarray]:
    """Return labels of one structure, each of which must be there and finite, in float64.

    Energy [] eV, forces [N, 3] eV/A, stress [3, 3] eV/A^3.
    """
    labels = labels or Labels()
    found = {}
    for quantity in quantities:
        key = labels.key(quantity)
        _, stored = _lookup(atoms, key)
        if stored is None:
            there = set().union(*_places(atoms)) - {"numbers", "positions"}
            raise InputError(
                f"no {quantity} under the name {key!r}; the structure has "
                f"{', '.join(sorted(map(str, there))) or 'no labels at all'}. Set {quantity}_key "
                f"to the right name, or leave {quantity} out of the quantities"
            )
        value = _shaped(stored, quantity, key, len(atoms)) * labels.factor(quantity)
        if not np.isfinite(value).all():
            raise InputError(f"{quantity} ({key!r}) holds NaN or infinity; remove the structure")
        if (largest := np.abs(value).max(initial=0.0)) > LARGEST:
            raise InputError(
                f"{quantity} ({key!r}) of {largest:.3g} {UNITS[quantity]}; is the unit right? "
                "If so, remove the structure"
            )
        found[quantity] = value
    return found


def available(atoms: Atoms, labels: Labels | None = None) -> tuple[str, ...]:
    """Return which of "energy", "forces" and "stress" a structure has under these names."""
    labels = labels or Labels()
    return tuple(name for name in QUANTITIES if _lookup(atoms, labels.key(name))[1] is not None)


def found_as_mace(atoms: Atoms, labels: Labels | None = None) -> list[str]:
    """Return MACE's names under which labels are found for want of those asked for."""
    keys_there = map((labels or Labels()).key, available(atoms, labels))
    return [name for key in keys_there if (name := _lookup(atoms, key)[0]) != key]


def _lookup(atoms: Atoms, key: str) -> tuple[str, Any]:
    """Return the name and value of a label, or None; MACE's names come after the standard ones."""
    for name in (key, MACE_PREFIX + key) if key in QUANTITIES else (key,):
        for place in _places(atoms):
            if place.get(name) is not None:
                if place is getattr(atoms.calc, "results", None):
                    _refuse_stale(atoms)
                return name, place[name]
    return key, None


def _places(atoms: Atoms) -> tuple[dict[str, Any], ...]:
    """Return where labels are looked for: in the calculator, then in `info` and `arrays`."""
    return getattr(atoms.calc, "results", None) or {}, atoms.info, atoms.arrays


def _refuse_stale(atoms: Atoms) -> None:
    """Refuse labels that were computed before the atoms moved."""
    before: Atoms | None = getattr(atoms.calc, "atoms", None)
    unimportant = ("initial_charges", "initial_magmoms")
    changed = [] if before is None else compare_atoms(before, atoms, 0.0, unimportant)
    if changed:
        raise InputError(
            f"the labels belong to another geometry: {', '.join(changed)} changed after the "
            "calculation; compute the labels again"
        )


def _shaped(stored: Any, quantity: str, key: str, num_atoms: int) -> np.ndarray:
    """Convert to float64 of the quantity's shape; six or nine stress components to 3 x 3."""
    value = np.asarray(stored)
    if value.dtype.kind not in "iuf":  # text, or T and F, which would count as 1 and 0
        raise InputError(f"{quantity} ({key!r}) is not numeric: {stored!r}")
    value = value.astype(np.float64)
    if quantity == keys.STRESS and value.shape == (6,):
        return voigt_6_to_full_3x3_stress(value)
    shape, expected = {
        keys.ENERGY: ((), "one number"),
        keys.FORCES: ((num_atoms, 3), f"{num_atoms} x 3 numbers"),
        keys.STRESS: ((3, 3), "6 (ASE's Voigt order), 9 or 3 x 3 numbers"),
    }[quantity]
    if value.size != np.prod(shape) or (quantity == keys.FORCES and value.shape != shape):
        raise InputError(f"{quantity} ({key!r}) has shape {value.shape}; expected {expected}")
    return value.reshape(shape)
