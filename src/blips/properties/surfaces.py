r"""Energy surfaces: of the plain model, of a member, and all members' changes at one geometry.

Members of a conditioned posterior are linear in their noise, E_k(x) = E(x) + b(x) . v_k. Their
changes b . v_k at given geometries come for all k from one pass, which is what error bars to first
order are made of: along the geometries x*(s) that minimise the plain model's energy (ions relaxed
at strain s),

    d/dv  min_x E_k(x, s) = b(x*(s), s)         (the energy is stationary in x: envelope theorem)

so neither relaxed energies nor their derivatives by strain need a member to be relaxed.
"""

import warnings
from collections.abc import Callable, Sequence

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols

from blips import keys
from blips.backbones.base import graph_batches
from blips.data.graph import Graph
from blips.errors import InputError
from blips.inference.conditioned import linearise
from blips.inference.linearise import Linearised
from blips.potential import BayesianPotential
from blips.prediction import Prediction
from blips.properties.result import PropertyError, Values

Array = np.ndarray
Surface = Callable[..., Prediction]  # (structures, stress=...) -> energy, forces, stress
Progress = Callable[[str], object]
BATCH = 32


def quiet(text: str) -> None:
    """Show no progress."""


def plain_surface(potential: BayesianPotential) -> Surface:
    """Return the surface of the posterior's mean."""

    def predict(structures: Sequence[Atoms], *, stress: bool = False) -> Prediction:
        return potential.predict(structures, method="map", stress=stress, batch_size=BATCH)

    return predict


def by_members(
    potential: BayesianPotential,
    members: int,
    seed: int,
    compute: Callable[[Surface], Values],
    progress: Progress = quiet,
) -> tuple[list[Values], dict[int, str]]:
    """Compute values with each member; where one fails, note why and go on.

    Returns:
        The values of the members that succeeded, and number -> why of the others.
    """
    found: list[Values] = []
    failures: dict[int, str] = {}
    for number, member in enumerate(potential.draw(members, seed=seed)):
        progress(f"member {number + 1} of {members}")
        try:
            found.append(compute(member.predict))
        except PropertyError as error:
            failures[number] = str(error)
    return found, failures


def energy_changes(
    potential: BayesianPotential, structures: Sequence[Atoms], members: int, seed: int
) -> Array:
    """Compute changes b . v_k of all members' energies, [K, S] eV, without backward passes."""
    noise = _draws(potential, structures, members, seed)
    parts = [
        linearised.energy_changes(noise)[keys.ENERGY].numpy(force=True)
        for linearised in _passes(potential, structures, forces=False)
    ]
    return np.concatenate(parts, axis=1)


def force_changes(
    potential: BayesianPotential, structures: Sequence[Atoms], members: int, seed: int
) -> list[Array]:
    """Compute changes of the forces of all members, [K, N, 3] eV/A for each structure."""
    noise = _draws(potential, structures, members, seed)
    return [
        linearised.members(noise)[keys.FORCES].double().numpy(force=True)
        for linearised in _passes(potential, structures, forces=True)
    ]


def _passes(potential: BayesianPotential, structures: Sequence[Atoms], *, forces: bool):
    """Linearise the potential on batches; structure by structure where forces are asked for."""
    posterior = potential.conditioned()
    network = potential.coefficients if posterior.coefficients == "network" else None
    graphs = graph_batches(potential.backbone, structures, 1 if forces else BATCH)

    def pass_over(graph: Graph) -> Linearised:
        depth = "members" if forces else "energies"
        return linearise(potential.backbone, posterior, graph, forces, False, network, depth)

    return map(pass_over, graphs)


def _draws(potential: BayesianPotential, structures: Sequence[Atoms], members: int, seed: int):
    """Draw v_k [K, d] as `potential.draw` does; warn of elements without data."""
    if potential.posterior is None:
        raise InputError(
            "error bars to first order need a posterior that has seen data; condition the "
            'potential (potential.condition), or use method="members"'
        )
    posterior = potential.conditioned()
    unknown = {int(z) for atoms in structures for z in atoms.numbers} - posterior.domain.numbers
    if unknown:
        symbols = ", ".join(chemical_symbols[number] for number in sorted(unknown))
        warnings.warn(
            f"the structures that the posterior was conditioned on have no {symbols}: error bars "
            "of properties of such structures are too small. Condition on such structures too",
            stacklevel=4,
        )
    return posterior.draws(members, seed)
