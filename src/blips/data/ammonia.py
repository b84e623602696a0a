"""Ammonia: the shipped NH3 data set, and the DFT labels it was made with.

Level of theory: BP86-D3(BJ)/def2-SVP, closed shell, Coulomb part by density fitting:

    E = E_KS[B88 + P86, def2-SVP, RI-J] + E_D3(BJ, "bp") - E_min

P86 is the gradient correction of Perdew (1986) on top of the PW92 local correlation. libxc's P86
brings the PZ81 local part, which `FUNCTIONAL` exchanges for PW92. So defined, the labels agree
with those of the public BP86-D3/def2-SVP ammonia set (ORCA, 108 geometries, 0-42 kcal/mol) to
0.0005 kcal/mol and 0.003 kcal/mol/A on average, 0.002 and 0.03 at worst. With VWN5 local
correlation and no density fitting (`b88,p86vwn`) the agreement is 0.01 kcal/mol and 0.05
kcal/mol/A; zero damping instead of Becke-Johnson damping misses single force components of
stretched bonds by 0.5 kcal/mol/A.

The analytic gradient includes the response of the integration grid: forces are the derivative of
the very energy that is reported, and their sum is zero to rounding.
"""

from importlib import resources
from typing import Any, Literal, get_args

import ase.io
import numpy as np
from ase import Atoms, units
from ase.calculators.singlepoint import SinglePointCalculator

from blips.errors import InputError, MissingPackageError

AmmoniaSplit = Literal["train", "valid", "test_ood"]

FUNCTIONAL = "b88,p86-pz+pw"
BASIS = "def2-svp"
COULOMB_FITTING_BASIS = "def2-universal-jfit"
GRID_LEVEL = 4
DISPERSION_METHOD = "bp"
MINIMUM_ENERGY = -1537.735001  # eV, total energy of the optimised pyramid at this level


def load_ammonia(split: AmmoniaSplit) -> list[Atoms]:
    """Read one split of the shipped NH3 data set.

    Args:
        split: "train" (78 geometries, 0-5 kcal/mol above the minimum), "valid" (14 of the same
            kind) or "test_ood" (129 distorted ones, 5-70 kcal/mol).

    Returns:
        Structures with a `SinglePointCalculator` that holds `energy` (eV, relative to the minimum)
        and `forces` (eV/A). `info["kind"]` says how the geometry was made.
    """
    if split not in get_args(AmmoniaSplit):
        raise InputError(
            f"unknown ammonia split {split!r}; use one of {', '.join(get_args(AmmoniaSplit))}"
        )
    source = resources.files("blips.data") / "files" / f"nh3_{split}.extxyz"
    with resources.as_file(source) as path:
        frames = ase.io.read(path, index=":", format="extxyz")
    return [frames] if isinstance(frames, Atoms) else list(frames)


def label(atoms: Atoms) -> Atoms:
    """Compute energy and forces of one ammonia molecule at the data set's level of theory.

    Takes a few seconds on one core (PySCF follows OMP_NUM_THREADS).

    Args:
        atoms: one N and three H in any order, without periodic boundaries.

    Returns:
        A copy with a `SinglePointCalculator`: `energy` (eV, relative to the minimum) and `forces`
        (eV/A).

    Raises:
        InputError: if this is not NH3, or if the SCF does not converge.
        MissingPackageError: if PySCF or dftd3 is missing.
    """
    _check_ammonia(atoms)
    energy, forces = kohn_sham(atoms)
    dispersion_energy, dispersion_forces = dispersion(atoms)
    labelled = atoms.copy()
    labelled.calc = SinglePointCalculator(
        labelled,
        energy=energy + dispersion_energy - MINIMUM_ENERGY,
        forces=forces + dispersion_forces,
    )
    return labelled


def _check_ammonia(atoms: Atoms) -> None:
    if sorted(atoms.numbers.tolist()) != [1, 1, 1, 7]:
        raise InputError(
            f"label() is for ammonia, got {atoms.get_chemical_formula()!r}; "
            "expected one N and three H, because energies are relative to the NH3 minimum"
        )
    if atoms.pbc.any():
        raise InputError("label() treats an isolated molecule; set atoms.pbc = False")
    if not np.isfinite(atoms.positions).all():
        raise InputError("positions contain NaN or infinity; give finite coordinates in Angstrom")


def kohn_sham(
    atoms: Atoms,
    functional: str = FUNCTIONAL,
    basis: str = BASIS,
    *,
    charge: int = 0,
    spin: int = 0,
    grid_level: int = GRID_LEVEL,
    fitting: str | None = COULOMB_FITTING_BASIS,
) -> tuple[float, np.ndarray]:
    """Compute Kohn-Sham energy (eV) and forces [N, 3] (eV/A) of a molecule, no dispersion."""
    try:
        from pyscf import dft, gto
    except ImportError as error:
        raise _missing("pyscf") from error
    geometry = list(zip(atoms.get_chemical_symbols(), atoms.positions.tolist(), strict=True))
    molecule: Any = gto.M(
        atom=geometry, basis=basis, charge=charge, spin=spin, unit="Angstrom", verbose=0
    )
    method = dft.RKS if spin == 0 else dft.UKS
    calculation: Any = method(molecule, xc=functional).density_fit(auxbasis=fitting)
    calculation.grids.level = grid_level
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


def dispersion(atoms: Atoms, method: str = DISPERSION_METHOD) -> tuple[float, np.ndarray]:
    """Compute the D3(BJ) dispersion correction: energy (eV) and forces [N, 3] (eV/A)."""
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
        f"labelling by PySCF needs the package {package!r}, which cannot be imported; "
        "install it with: pip install 'blips-mlip[dft]'"
    )
