"""PySCF for ASE: Kohn-Sham energies and forces of molecules, with D3 dispersion.

The default is the level of the shipped ammonia set (`blips.data.ammonia`), BP86-D3(BJ)/def2-SVP,
closed shell, Coulomb part by density fitting:

    E = E_KS[B88 + P86, def2-SVP, RI-J] + E_D3(BJ, "bp")

P86 is the gradient correction of Perdew (1986) on top of the PW92 local correlation. libxc's P86
brings the PZ81 local part, which `FUNCTIONAL` exchanges for PW92. So defined, energies agree with
those of the public BP86-D3/def2-SVP ammonia set (ORCA, 108 geometries, 0-42 kcal/mol) to 0.0005
kcal/mol and 0.003 kcal/mol/A on average, 0.002 and 0.03 at worst. With VWN5 local correlation and
no density fitting (`b88,p86vwn`) the agreement is 0.01 kcal/mol and 0.05 kcal/mol/A; zero damping
instead of Becke-Johnson damping misses single force components of stretched bonds by 0.5
kcal/mol/A.

The analytic gradient includes the response of the integration grid: forces are the derivative of
the very energy that is reported, and their sum is zero to rounding.
"""

from typing import Any

import numpy as np
from ase import Atoms, units
from ase.calculators.calculator import Calculator, all_changes

from blips.errors import InputError, require

FUNCTIONAL = "b88,p86-pz+pw"
PIP_LINE = "pip install 'blips-mlip[dft]'"


class PySCF(Calculator):
    """Restricted (or, with unpaired electrons, unrestricted) Kohn-Sham by density fitting.

    The functional is one of libxc, as PySCF names it; `dispersion` a method of D3(BJ), such as
    "bp", "pbe", "b3lyp", or None; `spin` the number of unpaired electrons; `fitting` the auxiliary
    basis of the Coulomb part, None for PySCF's own choice.
    """

    implemented_properties = ["energy", "forces"]  # noqa: RUF012 (ASE declares it so)

    def __init__(
        self,
        functional: str = FUNCTIONAL,
        basis: str = "def2-svp",
        dispersion: str | None = "bp",
        charge: int = 0,
        spin: int = 0,
        grid_level: int = 4,
        fitting: str | None = "def2-universal-jfit",
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
        """Compute energy and forces together; a few seconds for NH3 on one core."""
        super().calculate(atoms, properties, system_changes)
        structure: Any = self.atoms
        if structure.pbc.any():
            raise InputError("the pyscf calculator treats molecules; set atoms.pbc = False")
        if not np.isfinite(structure.positions).all():
            raise InputError("positions hold NaN or infinity; give finite coordinates in Angstrom")
        energy, forces = self._kohn_sham(structure)
        if self.dispersion is not None:
            module = require("dftd3.ase", PIP_LINE)
            correction = module.DFTD3(method=self.dispersion, damping="d3bj")
            energy += correction.get_potential_energy(structure)
            forces = forces + correction.get_forces(structure)
        self.results = {"energy": energy, "forces": forces}

    def _kohn_sham(self, atoms: Atoms) -> tuple[float, np.ndarray]:
        """Return the energy in eV and the forces [N, 3] in eV/A."""
        molecule: Any = require("pyscf", PIP_LINE).M(
            atom=list(zip(atoms.get_chemical_symbols(), atoms.positions.tolist(), strict=True)),
            basis=self.basis,
            charge=self.charge,
            spin=self.spin,
            unit="Angstrom",
            verbose=0,
        )
        method = molecule.RKS if self.spin == 0 else molecule.UKS
        calculation: Any = method(xc=self.functional).density_fit(auxbasis=self.fitting)
        calculation.grids.level = self.grid_level
        calculation.conv_tol = 1e-10  # Hartree
        energy = float(calculation.kernel()) * units.Hartree
        if not calculation.converged:
            raise InputError(
                f"the SCF did not converge within {calculation.max_cycle} cycles; the geometry is "
                "probably too distorted, or the spin wrong: leave it out or change the settings"
            )
        gradient: Any = calculation.nuc_grad_method()
        gradient.grid_response = True
        return energy, -np.asarray(gradient.kernel()) * units.Hartree / units.Bohr
