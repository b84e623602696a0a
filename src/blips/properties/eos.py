r"""Equation of state with error bars: V0, B0 and B' of Birch and Murnaghan.

Their third order is a cubic polynomial in x = V^(-2/3), so that the fit is linear least squares:

    E = c0 + c1 x + c2 x^2 + c3 x^3,     E'(x0) = 0,     V0 = x0^(-3/2)
    B0 = V d2E/dV2 = 4/9 E''(x0) x0^(7/2)
    B' = 4 + 2/3 * x0 E'''(x0) / E''(x0)

(the last from eliminating c2 and c3 of the third order). "linear" adds the members' changes at the
plain model's geometries, whose ions are relaxed at each volume: to first order exact.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from ase import Atoms
from ase.units import GPa

from blips.errors import InputError
from blips.potential import BayesianPotential
from blips.properties.relax import FMAX, STEPS, relaxed
from blips.properties.result import (
    Properties,
    PropertyError,
    Values,
    check_method,
    first_order,
    gathered,
)
from blips.properties.surfaces import (
    Progress,
    Surface,
    by_members,
    energy_changes,
    plain_surface,
    quiet,
)

Array = np.ndarray
UNITS = {"volume": "A^3", "bulk_modulus": "GPa", "bulk_modulus_derivative": ""}
SCALES = tuple(np.linspace(0.94, 1.06, 7))


def equation_of_state(
    potential: BayesianPotential,
    atoms: Atoms,
    *,
    method: str = "linear",
    members: int = 16,
    seed: int = 0,
    scales: Sequence[float] = SCALES,
    fmax: float = FMAX,
    steps: int = STEPS,
    progress: Progress = quiet,
) -> Properties:
    """Compute volume, bulk modulus and its pressure derivative at zero temperature.

    Args:
        potential: with a posterior.
        atoms: the crystal, whose cell is relaxed first.
        method: "linear", or "members": each relaxes the ions at every volume.
        members: K.
        seed: of the draws.
        scales: volumes over that of the relaxed cell, at least 4.
        fmax: largest force after relaxation, eV/A.
        steps: of each relaxation at most.
        progress: is told what is being done.

    Returns:
        Quantities of `UNITS`; `details` has the volumes (A^3) and energies (eV) of the curve.
    """
    check_method(method, members)
    if len(set(scales)) < 4:
        raise InputError(f"{len(set(scales))} volumes; a fit of four numbers needs at least 4")
    surface = plain_surface(potential)
    progress("relaxing the mean")
    (mean,) = relaxed(surface, [atoms], cell=True, fmax=fmax, steps=steps)
    start = [isotropic(mean, scale) for scale in scales]
    path = relaxed(surface, start, fmax=fmax, steps=steps)
    volumes = np.array([one.cell.volume for one in path])
    energies = surface(path).array("energy")
    value = birch_murnaghan(volumes, energies)
    details: dict[str, Any] = {"volumes": volumes, "energies": energies}
    changes = (
        None if potential.posterior is None else energy_changes(potential, path, members, seed)
    )
    if changes is not None:
        details["member_energies"] = energies + changes
    if method == "linear":
        changes = energy_changes(potential, path, members, seed) if changes is None else changes
        found = first_order(lambda curve: birch_murnaghan(volumes, curve), energies, changes)
        return gathered("equation_of_state", method, UNITS, value, found, details=details)

    def of_member(surface: Surface) -> Values:
        own = relaxed(surface, path, fmax=fmax, steps=steps)
        return birch_murnaghan(volumes, surface(own).array("energy"))

    values, failures = by_members(potential, members, seed, of_member, progress)
    return gathered("equation_of_state", method, UNITS, value, values, failures, details)


def isotropic(atoms: Atoms, scale: float) -> Atoms:
    """Copy of a crystal with that multiple of its volume."""
    found = atoms.copy()
    found.set_cell(atoms.cell.array * scale ** (1 / 3), scale_atoms=True)
    return found


def birch_murnaghan(volumes: Array, energies: Array) -> Values:
    """Fit V0 (A^3), B0 (GPa) and B' to a curve of volumes (A^3) and energies (eV)."""
    middle = volumes.mean()
    x = (volumes / middle) ** (-2 / 3)
    curve = np.polynomial.Polynomial.fit(x, energies - energies.mean(), 3).convert()
    slope, curvature, third = (curve.deriv(n) for n in (1, 2, 3))
    minima = [
        root.real for root in slope.roots() if abs(root.imag) < 1e-9 and curvature(root.real) > 0
    ]
    inside = [root for root in minima if x.min() <= root <= x.max()]
    if not inside:
        raise PropertyError(
            f"the energy has no minimum between {volumes.min():.4g} and {volumes.max():.4g} A^3; "
            "give volumes around it"
        )
    best = inside[0]
    return {
        "volume": middle * best**-1.5,
        "bulk_modulus": 4 / 9 * curvature(best) * best**3.5 / middle / GPa,
        "bulk_modulus_derivative": 4 + 2 / 3 * best * third(best) / curvature(best),
    }
