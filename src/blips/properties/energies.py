r"""Relaxed structures, their energies and formation energies with error bars.

The error bar of a relaxed energy has two parts. At the geometry x* that minimises the plain model's
energy, a member differs by b(x*) . v_k: first order, and all that "linear" needs. Relaxing with the
member then lowers its energy by half of f_k^T H^-1 f_k, with its forces f_k at x* and the Hessian
H: second order, always downwards. `energy_at_mean_geometry` and `energy` of method "members" differ
by this; where the difference is not small beside the std, trust the members.

A formation energy is a difference of energies whose errors are correlated,

    E_f = ( E(x) - sum_i n_i E_i / N_i ) / N

with the reference of each element i, a crystal or molecule of N_i of its atoms. A member is one
set of weights for compound and references, so that errors which they share cancel:

    dE_f,k = ( b(x) - sum_i n_i b(x_i) / N_i ) . v_k / N

Error bars of the single energies, added as if they were independent, would not know that.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ase import Atoms

from blips.errors import InputError
from blips.potential import BayesianPotential
from blips.properties.calculation import Calculation, Surface
from blips.properties.result import Properties, Values

RELAXED = {"energy": "eV", "energy_at_mean_geometry": "eV", "volume": "A^3", "cell_lengths": "A"}
References = Mapping[str, Atoms | float]


def relax(
    potential: BayesianPotential, atoms: Atoms, *, cell: bool | None = None, **options: Any
) -> Properties:
    """Relax a structure, by default with its cell where it is a crystal; options of `Calculation`.

    Returns:
        Quantities of `RELAXED` (linear: the energy), and the structure that the plain model relaxed
        as `Atoms.fromdict(found.details["structure"])`.
    """
    run = Calculation(potential, **options)
    cell = bool(atoms.pbc.all()) if cell is None else cell
    (mean,) = run.relaxed(run.plain, [atoms], cell=cell)

    def values(surface: Surface, own: Atoms) -> Values:
        energy, fixed = surface([own, mean]).array("energy")
        return {
            "energy": float(energy),
            "energy_at_mean_geometry": float(fixed),
            "volume": own.cell.volume,
            "cell_lengths": own.cell.lengths(),
        }

    value = values(run.plain, mean)

    def first_order() -> list[Values]:
        return [{"energy": value["energy"] + change} for change in run.energy_changes([mean])[:, 0]]

    def of_member(surface: Surface) -> Values:
        return values(surface, run.relaxed(surface, [mean], cell=cell)[0])

    units = RELAXED if run.method == "members" else {"energy": "eV"}
    plain = mean.copy()
    plain.info, plain.constraints = {}, []  # neither need be JSON-able
    details = {"structure": plain.todict()}
    return run.finished("relax", units, value, first_order, of_member, details)


def formation_energy(
    potential: BayesianPotential, atoms: Atoms, references: References, **options: Any
) -> Properties:
    """Compute the formation energy of a relaxed structure from elements, eV/atom.

    Of each element `references` has the structure, relaxed likewise (with its cell where it is a
    crystal), or the energy in eV/atom where it is known from elsewhere, which has then no error.
    Options are those of `Calculation`.
    """
    run = Calculation(potential, **options)
    counts = Counter(atoms.symbols)
    if missing := sorted(counts.keys() - references.keys()):
        raise InputError(f"no reference for {', '.join(missing)}; give a structure or an energy")
    structures, weights, constant = [atoms], [1.0 / len(atoms)], 0.0
    for symbol, reference in references.items():
        share = counts[symbol] / len(atoms)
        if not isinstance(reference, Atoms):
            constant += share * reference
        elif set(reference.symbols) != {symbol}:
            raise InputError(f"the reference of {symbol} is {reference.symbols}")
        elif share:
            structures.append(reference)
            weights.append(-share / len(reference))

    def minima(surface: Surface, start: Sequence[Atoms]) -> list[Atoms]:
        return [run.relaxed(surface, [one], cell=bool(one.pbc.all()))[0] for one in start]

    def values(energies: np.ndarray) -> Values:
        return {"formation_energy": float(np.dot(weights, energies)) - constant}

    mean = minima(run.plain, structures)
    energies = run.plain(mean).array("energy")

    def first_order() -> list[Values]:
        return [values(energies + change) for change in run.energy_changes(mean)]

    def of_member(surface: Surface) -> Values:
        return values(surface(minima(surface, mean)).array("energy"))

    units = {"formation_energy": "eV/atom"}
    return run.finished("formation", units, values(energies), first_order, of_member)
