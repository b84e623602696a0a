r"""Relaxed structures and energies with error bars.

The error bar of a relaxed energy has two parts. At the geometry x* that minimises the plain model's
energy, a member differs by b(x*) . v_k: first order, and all that "linear" needs. Relaxing with the
member then lowers its energy by half of f_k^T H^-1 f_k, with its forces f_k at x* and the Hessian
H: second order, always downwards. `energy_at_mean_geometry` and `energy` of method "members" differ
by this; where the difference is not small beside the std, trust the members.
"""

from typing import Any

from ase import Atoms

from blips.potential import BayesianPotential
from blips.properties.calculation import Calculation, Surface
from blips.properties.result import Properties, Values

UNITS = {"energy": "eV", "energy_at_mean_geometry": "eV", "volume": "A^3", "cell_lengths": "A"}


def relax(
    potential: BayesianPotential, atoms: Atoms, *, cell: bool | None = None, **options: Any
) -> Properties:
    """Relax a structure with the plain model; error bars of its energy and cell.

    Args:
        potential: with a posterior.
        atoms: where to start.
        cell: relax the cell too; by default that of crystals.
        options: of `Calculation`.

    Returns:
        Quantities of `UNITS` (linear: the energy), and the relaxed structure as
        `Atoms.fromdict(found.details["structure"])`.
    """
    run = Calculation(potential, **options)
    cell = bool(atoms.pbc.all()) if cell is None else cell
    run.progress("relaxing the mean")
    (mean,) = run.relaxed(run.plain, [atoms], cell=cell)

    def values(surface: Surface, own: Atoms) -> Values:
        energy, fixed = surface([own, mean]).array("energy")
        return {
            "energy": float(energy),
            "energy_at_mean_geometry": float(fixed),
            "volume": own.cell.volume,
            "cell_lengths": own.cell.lengths(),
        }

    value, factor = values(run.plain, mean), run.energy_factor

    def first_order() -> list[Values]:
        changes = factor * run.energy_changes([mean])[:, 0]
        return [{"energy": value["energy"] + change} for change in changes]

    def of_member(surface: Surface) -> Values:
        one = values(surface, run.relaxed(surface, [mean], cell=cell)[0])
        for name in ("energy", "energy_at_mean_geometry"):
            one[name] = value[name] + factor * (one[name] - value[name])
        return one

    units = UNITS if run.method == "members" else {"energy": "eV"}
    plain = mean.copy()
    plain.info, plain.constraints = {}, []  # neither need be JSON-able
    details = {"structure": plain.todict()}
    return run.finished("relax", units, value, first_order, of_member, details)
