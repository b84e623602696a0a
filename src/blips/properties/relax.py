r"""Relaxed structures and energies with error bars.

The error bar of a relaxed energy has two parts. At the geometry x* that minimises the plain model's
energy, a member differs by b(x*) . v_k: first order, and all that "linear" needs. Relaxing with the
member then lowers its energy by half of f_k^T H^-1 f_k, with its forces f_k at x* and the Hessian
H: second order, always downwards. `energy_at_mean_geometry` and `energy` of method "members" differ
by this; where the difference is not small beside the std, trust the members.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.filters import FrechetCellFilter
from ase.optimize import BFGS
from ase.stress import full_3x3_to_voigt_6_stress

from blips.potential import BayesianPotential
from blips.properties.result import Properties, PropertyError, Values, check_method, gathered
from blips.properties.surfaces import (
    Progress,
    Surface,
    by_members,
    energy_changes,
    plain_surface,
    quiet,
)

FMAX = 0.002  # eV/A
STEPS = 300
UNITS = {"energy": "eV", "energy_at_mean_geometry": "eV", "volume": "A^3", "cell_lengths": "A"}


def relax(
    potential: BayesianPotential,
    atoms: Atoms,
    *,
    cell: bool | None = None,
    method: str = "linear",
    members: int = 16,
    seed: int = 0,
    fmax: float = FMAX,
    steps: int = STEPS,
    progress: Progress = quiet,
) -> Properties:
    """Relax a structure with the plain model; error bars of its energy and cell.

    Args:
        potential: with a posterior.
        atoms: where to start.
        cell: relax the cell too; by default that of crystals.
        method: "linear", of the energy alone, or "members": each relaxes from the plain
            model's minimum.
        members: K.
        seed: of the draws.
        fmax: largest force at the end, eV/A.
        steps: at most.
        progress: is told what is being done.

    Returns:
        Quantities of `UNITS` (linear: the energy), and the relaxed structure as
        `Atoms.fromdict(found.details["structure"])`.
    """
    check_method(method, members)
    cell = bool(atoms.pbc.all()) if cell is None else cell
    surface = plain_surface(potential)
    progress("relaxing the mean")
    (mean,) = relaxed(surface, [atoms], cell=cell, fmax=fmax, steps=steps)
    details = {"structure": mean.todict()}
    value = _values(surface, mean, mean)
    factor = energy_factor(potential)
    if method == "linear":
        changes = factor * energy_changes(potential, [mean], members, seed)[:, 0]
        found: list[Values] = [{"energy": value["energy"] + change} for change in changes]
        return gathered("relax", method, {"energy": "eV"}, value, found, details=details)

    def of_member(surface: Surface) -> Values:
        (own,) = relaxed(surface, [mean], cell=cell, fmax=fmax, steps=steps)
        return _values(surface, own, mean)

    values, failures = by_members(potential, members, seed, of_member, progress)
    for one in values:  # what validation energies decided about deviations of energies
        for name in ("energy", "energy_at_mean_geometry"):
            one[name] = value[name] + factor * (one[name] - value[name])
    return gathered("relax", method, UNITS, value, values, failures, details)


def _values(surface: Surface, own: Atoms, mean: Atoms) -> Values:
    energy, fixed = surface([own, mean]).array("energy")
    return {
        "energy": float(energy),
        "energy_at_mean_geometry": float(fixed),
        "volume": own.cell.volume,
        "cell_lengths": own.cell.lengths(),
    }


def energy_factor(potential: BayesianPotential) -> float:
    """Return the factor on the std of energies, see `blips.inference.conditioned`."""
    return 1.0 if potential.posterior is None else potential.posterior.scale.energy_factor


def relaxed(
    surface: Surface,
    structures: Sequence[Atoms],
    *,
    cell: bool = False,
    fmax: float = FMAX,
    steps: int = STEPS,
) -> list[Atoms]:
    """Relax structures side by side, each with a BFGS of its own; a step is one batch.

    Returns copies without calculators. Raises `PropertyError` where one does not converge.
    """
    found = [atoms.copy() for atoms in structures]
    movers = [FrechetCellFilter(atoms) if cell else atoms for atoms in found]
    optimisers = [BFGS(mover, logfile=None, maxstep=0.1) for mover in movers]  # type: ignore[arg-type]
    active = list(range(len(found)))
    largest = np.zeros(len(found))
    for _ in range(steps + 1):
        prediction = surface([found[i] for i in active], stress=cell)
        for place, i in enumerate(active):
            give_results(found[i], prediction[place])
            forces = movers[i].get_forces()
            largest[i] = np.sqrt(np.square(forces).sum(axis=1).max())
        active = [i for i in active if not largest[i] < fmax]
        if not np.isfinite(largest).all():
            break
        if not active:
            for atoms in found:
                atoms.calc = None
            return found
        for i in active:
            optimisers[i].step()
    raise PropertyError(
        f"no minimum after {steps} steps: a force of {largest.max():.3g} eV/A is left, expected "
        f"less than {fmax:g}; start from a better structure, or allow more steps or force"
    )


def give_results(atoms: Atoms, one: Any) -> None:
    """Attach predicted results to the structure, for ASE to find."""
    results: dict[str, Any] = {"energy": float(one.array("energy")[0]), "forces": one.forces}
    if one.stress is not None:
        results["stress"] = full_3x3_to_voigt_6_stress(one.stress[0])
    atoms.calc = SinglePointCalculator(atoms, **results)
