"""PySCF for ASE: Kohn-Sham energies and forces of molecules, with D3 dispersion.

The defaults are BP86-D3(BJ)/def2-SVP, as for the shipped ammonia set (`blips.data.ammonia`), but
energies are total ones.
"""

from typing import Any

import numpy as np
from ase import Atoms, units
from ase.calculators.calculator import Calculator, all_changes

from blips.data import ammonia
from blips.errors import InputError, MissingPackageError


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
        energy, forces = self._kohn_sham(structure)
        if self.dispersion is not None:
            more_energy, more_forces = _dispersion(structure, self.dispersion)
            energy, forces = energy + more_energy, forces + more_forces
        self.results = {"energy": energy, "forces": forces}

    def _kohn_sham(self, atoms: Atoms) -> tuple[float, np.ndarray]:
        """Compute energy (eV) and forces [N, 3] (eV/A) without dispersion."""
        try:
            from pyscf import dft, gto
        except ImportError as error:
            raise _missing("pyscf") from error
        geometry = list(zip(atoms.get_chemical_symbols(), atoms.positions.tolist(), strict=True))
        molecule: Any = gto.M(
            atom=geometry,
            basis=self.basis,
            charge=self.charge,
            spin=self.spin,
            unit="Angstrom",
            verbose=0,
        )
        method = dft.RKS if self.spin == 0 else dft.UKS
        kohn_sham: Any = method(molecule, xc=self.functional).density_fit(auxbasis=self.fitting)
        kohn_sham.grids.level = self.grid_level
        kohn_sham.conv_tol = 1e-10  # Hartree
        energy = float(kohn_sham.kernel()) * units.Hartree
        if not kohn_sham.converged:
            raise InputError(f"the SCF did not converge within {kohn_sham.max_cycle} cycles")
        gradient: Any = kohn_sham.nuc_grad_method()
        gradient.grid_response = True
        return energy, -np.asarray(gradient.kernel()) * units.Hartree / units.Bohr


def _dispersion(atoms: Atoms, method: str) -> tuple[float, np.ndarray]:
    """Compute D3(BJ) energy (eV) and forces [N, 3] (eV/A)."""
    try:
        from dftd3.interface import DispersionModel, RationalDampingParam
    except ImportError as error:
        raise _missing("dftd3") from error
    model = DispersionModel(atoms.numbers, atoms.positions / units.Bohr)
    found = model.get_dispersion(RationalDampingParam(method=method), grad=True)
    forces = -np.asarray(found["gradient"]) * units.Hartree / units.Bohr
    return float(found["energy"]) * units.Hartree, forces


def _missing(package: str) -> MissingPackageError:
    return MissingPackageError(
        f"the pyscf calculator needs the package {package!r}; install it with: "
        "pip install 'blips-mlip[dft]'"
    )
