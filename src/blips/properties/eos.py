r"""Equation of state with error bars: V0, B0 and B' of Birch and Murnaghan.

Their third order is a cubic polynomial in x = V^(-2/3), so that the fit is linear least squares:

    E = c0 + c1 x + c2 x^2 + c3 x^3,     E'(x0) = 0,     V0 = x0^(-3/2)
    B0 = V d2E/dV2 = 4/9 E''(x0) x0^(7/2)
    B' = 4 + 2/3 * x0 E'''(x0) / E''(x0)

(the last from eliminating c2 and c3 of the third order). "linear" adds the members' changes at the
plain model's geometries, whose ions are relaxed at each volume: to first order exact.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from ase import Atoms
from ase.units import GPa

from blips.errors import InputError
from blips.potential import BayesianPotential
from blips.properties.calculation import Calculation, Surface
from blips.properties.result import Properties, PropertyError, Values, propagated

Array = np.ndarray
UNITS = {"volume": "A^3", "bulk_modulus": "GPa", "bulk_modulus_derivative": ""}
SCALES = tuple(np.linspace(0.94, 1.06, 7))


def equation_of_state(
    potential: BayesianPotential, atoms: Atoms, *, scales: Sequence[float] = SCALES, **options: Any
) -> Properties:
    """Compute volume, bulk modulus and its pressure derivative of a crystal at zero temperature.

    Its cell is relaxed first; `scales` are volumes over that of the relaxed cell, at least 4.
    Options are those of `Calculation`.

    Returns:
        Quantities of `UNITS`; `details` has the volumes (A^3) and energies (eV) of the curve.
    """
    run = Calculation(potential, **options)
    if len(set(scales)) < 4:
        raise InputError(f"{len(set(scales))} volumes; a fit of four numbers needs at least 4")
    mean = run.relaxed_crystal(atoms, "equations of state")
    path = run.relaxed(run.plain, [isotropic(mean, scale) for scale in scales])
    volumes = np.array([one.cell.volume for one in path])
    energies = run.plain(path).array("energy")
    details: dict[str, Any] = {"volumes": volumes, "energies": energies}
    if potential.posterior is not None or run.method == "linear":
        details["member_energies"] = energies + run.energy_changes(path)
    fitted = partial(birch_murnaghan, volumes)
    value = fitted(energies)

    def of_member(surface: Surface) -> Values:
        return fitted(surface(run.relaxed(surface, path)).array("energy"))

    def first_order() -> list[Values]:
        return propagated(fitted, energies, details["member_energies"] - energies)

    return run.finished("equation_of_state", UNITS, value, first_order, of_member, details)


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
    roots = [root.real for root in slope.roots() if abs(root.imag) < 1e-9]
    minima = [root for root in roots if curvature(root) > 0 and x.min() <= root <= x.max()]
    if not minima:
        raise PropertyError(
            f"the energy has no minimum between {volumes.min():.4g} and {volumes.max():.4g} A^3; "
            "give volumes around it"
        )
    best = minima[0]
    return {
        "volume": middle * best**-1.5,
        "bulk_modulus": 4 / 9 * curvature(best) * best**3.5 / middle / GPa,
        "bulk_modulus_derivative": 4 + 2 / 3 * best * third(best) / curvature(best),
    }
