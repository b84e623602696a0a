"""Unit factors, used only where data enters or leaves (eV and Angstrom inside)."""

from ase import units

from blips.errors import refuse_unknown

ENERGY_UNITS = {
    "eV": 1.0,
    "meV": 1e-3,
    "kcal/mol": units.kcal / units.mol,
    "kJ/mol": units.kJ / units.mol,
    "Hartree": units.Hartree,
    "Ry": units.Rydberg,
}
LENGTH_UNITS = {"A": 1.0, "Angstrom": 1.0, "Bohr": units.Bohr, "nm": units.nm}

KCAL_PER_MOL = ENERGY_UNITS["kcal/mol"]


def energy_factor(unit: str) -> float:
    """Return the factor that turns energies in `unit` into eV."""
    return _factor(unit, ENERGY_UNITS, "energy")


def length_factor(unit: str) -> float:
    """Return the factor that turns lengths in `unit` into Angstrom."""
    return _factor(unit, LENGTH_UNITS, "length")


def _factor(unit: str, known: dict[str, float], kind: str) -> float:
    refuse_unknown(f"{kind} unit", unit, known)
    return known[unit]
