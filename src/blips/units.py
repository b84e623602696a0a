"""Units in eV and Angstrom, used only where data enters or leaves."""

from ase import units

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
