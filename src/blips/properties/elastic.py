r"""Elastic constants with error bars: C_ij, and the moduli of Voigt, Reuss and Hill.

The energy of a crystal as a function of the strain e (six numbers of Voigt, the deformation being
I + e, ions relaxed) has the gradient g and the Hessian H = V C at its minimum. H comes from
central differences of g, which is exact in the stress: g = V sym( sigma (I + e)^-1 ).

To first order a member's Hessian differs in three ways, all linear in its noise:

    dH_k = d2(b . v_k)/de2  +  (dH/du) (u . e_k)  +  change of the coordinates at e_k

* The member's own curvature: energy changes at the plain model's strained cells, and at pairs of
  strains, whose ions are displaced by the sum of both displacements.
* Its own equilibrium, e_k = -H^-1 d(b . v_k)/de: a second Hessian of the plain model, strained
  along the main direction u of all e_k.
* Its strain is counted from its own cell: nothing new has to be computed.

Members that relax and are strained one by one have all orders.
"""

from itertools import combinations
from typing import Any

import numpy as np
from ase import Atoms
from ase.stress import (
    full_3x3_to_voigt_6_strain,
    full_3x3_to_voigt_6_stress,
    voigt_6_to_full_3x3_strain,
)
from ase.units import GPa

from blips.potential import BayesianPotential
from blips.properties.calculation import Calculation, Surface
from blips.properties.result import Properties, PropertyError, Values, propagated

Array = np.ndarray
UNITS = {"elastic_constants": "GPa", "bulk_modulus": "GPa", "shear_modulus": "GPa"}
STRAIN = 0.01
PAIRS = list(combinations(range(6), 2))


def elastic(
    potential: BayesianPotential, atoms: Atoms, *, strain: float = STRAIN, **options: Any
) -> Properties:
    """Compute elastic constants of a crystal at zero temperature, ions relaxed, and moduli.

    Its cell is relaxed first; `strain` is that of the finite differences. Options are those of
    `Calculation`.

    Returns:
        `elastic_constants` [6, 6], `bulk_modulus` and `shear_modulus` (Hill's averages), GPa.
    """
    run = Calculation(potential, **options)
    mean = run.relaxed_crystal(atoms, "elastic constants")
    crystal = Strained(run, mean, strain)
    hessian, ions = crystal.hessian(run.plain)
    constants = hessian / mean.cell.volume

    def first_order() -> list[Values]:
        if (lowest := np.linalg.eigvalsh(constants)[0] / GPa) <= 0:
            raise PropertyError(
                f"the crystal is not stable: its lowest elastic constant is {lowest:.3g} GPa, so "
                'that members have no equilibrium near it; use method="members"'
            )
        return propagated(moduli, constants, crystal.first_order_changes(hessian, ions))

    def of_member(surface: Surface) -> Values:
        (own,) = run.relaxed(surface, [mean], cell=True)
        found, _ = Strained(run, own, strain).hessian(surface, start=ions)
        return moduli(found / own.cell.volume)

    details = {"volume": mean.cell.volume}
    return run.finished("elastic", UNITS, moduli(constants), first_order, of_member, details)


class Strained:
    """A relaxed crystal under strain; h = `strain` is that of the finite differences."""

    def __init__(self, run: Calculation, atoms: Atoms, strain: float) -> None:
        self.run, self.atoms, self.strain = run, atoms, strain
        self.axes = strain * np.eye(6)  # h along each of Voigt's components

    def at(self, voigt: Array, ions: Array | None = None) -> Atoms:
        """Copy of the crystal under a strain, ions displaced by fractions of the cell."""
        found = self.atoms.copy()
        found.set_cell(self.atoms.cell.array @ voigt_6_to_full_3x3_strain(voigt), scale_atoms=True)
        if ions is not None:
            found.positions += ions @ found.cell.array
        return found

    def hessian(
        self, surface: Surface, base: Array | float = 0.0, start: Array | None = None
    ) -> tuple[Array, Array]:
        """Compute second derivatives of the energy by strain at `base`, ions relaxed, [6, 6] eV.

        Also returns the displacements of ions at +h and -h, [12, N, 3] in fractions; others may
        be given to `start` the relaxations from.
        """
        strains = np.concatenate([self.axes, -self.axes]) + base
        begin = [None] * 12 if start is None else start
        frames = [self.at(voigt, ions) for voigt, ions in zip(strains, begin, strict=True)]
        frames = self.run.relaxed(surface, frames)
        stress = surface(frames, stress=True).array("stress")  # [12, 3, 3]
        gradient, ions = np.empty((12, 6)), np.empty((12, len(self.atoms), 3))
        for k, (frame, voigt) in enumerate(zip(frames, strains, strict=True)):
            gradient[k] = energy_gradient(stress[k], voigt, frame.cell.volume)
            moved = frame.positions - self.at(voigt).positions
            ions[k] = moved @ np.linalg.inv(frame.cell.array)
        hessian = (gradient[:6] - gradient[6:]) / (2 * self.strain)
        return (hessian + hessian.T) / 2, ions

    def first_order_changes(self, hessian: Array, ions: Array) -> Array:
        """Compute first-order changes of the members' elastic constants, [K, 6, 6] eV/A^3."""
        gradient, curvature = self._energy_derivatives(ions)
        shift = -np.linalg.solve(hessian, gradient.T).T  # e_k, [K, 6]
        main = np.linalg.svd(shift)[2][0]
        spread = np.sqrt(np.square(shift @ main).mean())
        step = float(np.clip(spread, self.strain / 2, self.strain))
        moved, _ = self.hessian(self.run.plain, step * main, start=ions)
        along = (moved - hessian) / step
        change = curvature + (shift @ main)[:, None, None] * along
        for own, strain in zip(change, shift, strict=True):
            coordinates = _coordinates(strain)
            own += coordinates.T @ hessian + hessian @ coordinates
            own -= strain[:3].sum() * hessian  # per volume
        return change / self.atoms.cell.volume

    def _energy_derivatives(self, ions: Array) -> tuple[Array, Array]:
        """Compute strain gradient [K, 6] and Hessian [K, 6, 6] of members' energy changes, eV."""
        frames = [self.at(np.zeros(6))]
        frames += [self.at(e, u) for e, u in zip([*self.axes, *-self.axes], ions, strict=True)]
        for sign, of in ((1, ions[:6]), (-1, ions[6:])):
            frames += [
                self.at(sign * (self.axes[i] + self.axes[j]), of[i] + of[j]) for i, j in PAIRS
            ]
        energy = self.run.energy_changes(frames)  # [K, 43]
        here, up, down = energy[:, :1], energy[:, 1:7], energy[:, 7:13]
        both = energy[:, 13:28] + energy[:, 28:]
        hessian = np.empty((len(energy), 6, 6))
        hessian[:, range(6), range(6)] = (single := up + down - 2 * here)
        for n, (i, j) in enumerate(PAIRS):
            mixed = (both[:, n] - 2 * here[:, 0] - single[:, i] - single[:, j]) / 2
            hessian[:, i, j] = hessian[:, j, i] = mixed
        return (up - down) / (2 * self.strain), hessian / self.strain**2


def energy_gradient(stress: Array, voigt: Array, volume: float) -> Array:
    """Compute dE/de of the deformation I + e from the Cauchy stress (eV/A^3) there, [6] eV."""
    first = volume * stress @ np.linalg.inv(voigt_6_to_full_3x3_strain(voigt))
    return full_3x3_to_voigt_6_stress(first)  # its symmetric part


def _coordinates(strain: Array) -> Array:
    """Compute the matrix of e' -> sym(e' e): a strain e' on top of a small one e, [6, 6]."""
    one = np.eye(3)
    along = voigt_6_to_full_3x3_strain(np.eye(6)) - one  # [6, 3, 3], of each component
    on_top = along @ (voigt_6_to_full_3x3_strain(strain) - one)
    return full_3x3_to_voigt_6_strain(one + on_top).T


def moduli(constants: Array) -> Values:
    """Compute elastic constants and Voigt, Reuss and Hill moduli, eV/A^3 -> GPa."""
    c, s = constants / GPa, np.linalg.inv(constants) * GPa

    def sums(m: Array) -> tuple[float, float, float]:
        return m[:3, :3].sum(), m[:3, :3].trace(), m[3:, 3:].trace()

    total, diagonal, shear = sums(c)
    voigt = (total / 9, (3 * diagonal - total + 6 * shear) / 30)
    total, diagonal, shear = sums(s)
    reuss = (1 / total, 15 / (6 * diagonal - 2 * total + 3 * shear))
    bulk_modulus, shear_modulus = np.array([voigt, reuss]).mean(axis=0)
    return {"elastic_constants": c, "bulk_modulus": bulk_modulus, "shear_modulus": shear_modulus}
