"""PySCF for ASE: Kohn-Sham energies and forces of molecules, with D3 dispersion.

The defaults are BP86-D3(BJ)/def2-SVP, as for the shipped ammonia set (`blips.data.ammonia`), but
energies are total ones.
"""

from typing import Any

from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes

from blips.data import ammonia
from blips.errors import InputError


class PySCF(Calculator):
    """Restricted (or, with unpaired electrons, unrestricted) Kohn-Sham by density fitting.

    Args:
        functional: of libxc, as PySCF names it.
        basis: of the orbitals.
        dispersion: method of D3(BJ), such as "bp", "pbe", "b3lyp"; None for none.
        charge: of the molecule, e.
        spin: number of unpaired electrons.
        grid_level: of the integration grid.
        fitting: auxiliary basis of the Coulomb part; None for PySCF's own choice.
    """

    implemented_properties = ["energy", "forces"]  # noqa: RUF012 (ASE declares it so)

    def __init__(
        self,
        functional: str = ammonia.FUNCTIONAL,
        basis: str = ammonia.BASIS,
        dispersion: str | None = ammonia.DISPERSION_METHOD,
        charge: int = 0,
        spin: int = 0,
        grid_level: int = ammonia.GRID_LEVEL,
        fitting: str | None = ammonia.COULOMB_FITTING_BASIS,
    ) -> None:
        super().__init__()
        self.functional, self.basis, self.dispersion = functional, basis, dispersion
        self.charge, self.spin = charge, spin
        self.grid_level, self.fitting = grid_level, fitting

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: list[str] | None = None,
        system_changes: list[str] = all_changes,
    ) -> None:
        """Compute energy and forces together."""
        super().calculate(atoms, properties, system_changes)
        structure: Any = self.atoms
        if structure.pbc.any():
            raise InputError("the pyscf calculator treats molecules; set atoms.pbc = False")
        energy, forces = ammonia.kohn_sham(
            structure,
            self.functional,
            self.basis,
            charge=self.charge,
            spin=self.spin,
            grid_level=self.grid_level,
            fitting=self.fitting,
        )
        if self.dispersion is not None:
            more_energy, more_forces = ammonia.dispersion(structure, self.dispersion)
            energy, forces = energy + more_energy, forces + more_forces
        self.results = {"energy": energy, "forces": forces}
