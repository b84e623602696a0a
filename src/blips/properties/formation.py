r"""Formation energies with error bars: differences of energies whose errors are correlated.

    E_f = ( E(x) - sum_i n_i E_i / N_i ) / N

with the reference of each element i, a crystal or molecule of N_i of its atoms. A member is one
set of weights for compound and references, so that errors which they share cancel:

    dE_f,k = ( b(x) - sum_i n_i b(x_i) / N_i ) . v_k / N

Error bars of the single energies, added as if they were independent, would not know that.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from ase import Atoms

from blips.errors import InputError
from blips.potential import BayesianPotential
from blips.properties.relax import FMAX, STEPS, energy_factor, relaxed
from blips.properties.result import Properties, Values, check_method, gathered
from blips.properties.surfaces import (
    Progress,
    Surface,
    by_members,
    energy_changes,
    plain_surface,
    quiet,
)

Array = np.ndarray
UNITS = {"formation_energy": "eV/atom"}
References = Mapping[str, Atoms | float]


def formation_energy(
    potential: BayesianPotential,
    atoms: Atoms,
    references: References,
    *,
    method: str = "linear",
    members: int = 16,
    seed: int = 0,
    fmax: float = FMAX,
    steps: int = STEPS,
    progress: Progress = quiet,
) -> Properties:
    """Compute the formation energy of a relaxed structure from elements, eV/atom.

    Args:
        potential: with a posterior.
        atoms: the compound; relaxed first, with its cell where it is a crystal.
        references: element -> its structure, relaxed likewise, or its energy in eV/atom where it
            is known from elsewhere, which has then no error.
        method: "linear", or "members": each relaxes compound and references.
        members: K.
        seed: of the draws.
        fmax: largest force after relaxation, eV/A.
        steps: of each relaxation at most.
        progress: is told what is being done.
    """
    check_method(method, members)
    structures = {s: one for s, one in references.items() if isinstance(one, Atoms)}
    weights, constant = reaction(atoms, references)
    factor = energy_factor(potential)

    def minima(surface: Surface, start: list[Atoms]) -> list[Atoms]:
        return [
            relaxed(surface, [one], cell=bool(one.pbc.all()), fmax=fmax, steps=steps)[0]
            for one in start
        ]

    surface = plain_surface(potential)
    progress("relaxing the mean")
    needed = [one for symbol, one in structures.items() if symbol in set(atoms.symbols)]
    mean = minima(surface, [atoms, *needed])
    value = float(weights @ surface(mean).array("energy")) - constant
    if method == "linear":
        changes = factor * energy_changes(potential, mean, members, seed) @ weights
        found: list[Values] = [{"formation_energy": value + change} for change in changes]
        return gathered("formation_energy", method, UNITS, {"formation_energy": value}, found)

    def of_member(surface: Surface) -> Values:
        own = float(weights @ surface(minima(surface, mean)).array("energy")) - constant
        return {"formation_energy": value + factor * (own - value)}

    values, failures = by_members(potential, members, seed, of_member, progress)
    return gathered(
        "formation_energy", method, UNITS, {"formation_energy": value}, values, failures
    )


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
