r"""Formation energies with error bars: differences of energies whose errors are correlated.

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

Array = np.ndarray
UNITS = {"formation_energy": "eV/atom"}
References = Mapping[str, Atoms | float]


def formation_energy(
    potential: BayesianPotential, atoms: Atoms, references: References, **options: Any
) -> Properties:
    """Compute the formation energy of a relaxed structure from elements, eV/atom.

    Args:
        potential: with a posterior.
        atoms: the compound; relaxed first, with its cell where it is a crystal.
        references: element -> its structure, relaxed likewise, or its energy in eV/atom where it
            is known from elsewhere, which has then no error.
        options: of `Calculation`.
    """
    run = Calculation(potential, **options)
    weights, constant = reaction(atoms, references)
    factor = run.energy_factor

    def minima(surface: Surface, start: Sequence[Atoms]) -> list[Atoms]:
        return [run.relaxed(surface, [one], cell=bool(one.pbc.all()))[0] for one in start]

    run.progress("relaxing the mean")
    present = [one for symbol, one in references.items() if symbol in set(atoms.symbols)]
    mean = minima(run.plain, [atoms, *(one for one in present if isinstance(one, Atoms))])
    value = float(weights @ run.plain(mean).array("energy")) - constant

    def first_order() -> list[Values]:
        changes = factor * run.energy_changes(mean) @ weights
        return [{"formation_energy": value + change} for change in changes]

    def of_member(surface: Surface) -> Values:
        own = float(weights @ surface(minima(surface, mean)).array("energy")) - constant
        return {"formation_energy": value + factor * (own - value)}

    values: Values = {"formation_energy": value}
    return run.finished("formation", UNITS, values, first_order, of_member)


def reaction(atoms: Atoms, references: References) -> tuple[Array, float]:
    """Return the weights of the energies of the compound and of the reference structures.

    Returns:
        Weights [1 + references], 1/atoms, and what energies from elsewhere subtract, eV/atom.
    """
    counts = Counter(atoms.symbols)
    if missing := sorted(counts.keys() - references.keys()):
        raise InputError(f"no reference for {', '.join(missing)}; give a structure or an energy")
    weights, constant = [1.0 / len(atoms)], 0.0
    for symbol, reference in references.items():
        share = counts[symbol] / len(atoms)
        if isinstance(reference, Atoms):
            if set(reference.symbols) != {symbol}:
                raise InputError(f"the reference of {symbol} is {reference.symbols}")
            if share:
                weights.append(-share / len(reference))
        else:
            constant += share * reference
    return np.array(weights), constant
