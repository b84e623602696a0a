r"""Error bars of averages over trajectories.

Every frozen member of the posterior is a potential of its own, with its own equilibrium. An
average under member m follows from the trajectory of the mean potential by reweighting,

    <A>_m = sum_t w_t A_t / sum_t w_t,      w_t = exp(-(E_m(t) - E_0(t)) / kT)

and the std of `<A>_m` over the members is the error bar that the potential's uncertainty puts on
`<A>`. It holds while the effective number of frames, (sum w)^2 / sum w^2, stays large; where it
does not, run the members themselves (`blips.Calculator(potential, method="frozen", member=m)`) and
give their averages to `over_members`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from ase import Atoms
from ase.units import kB

from blips.errors import InputError
from blips.potential import BayesianPotential

Array = np.ndarray


@dataclass(frozen=True)
class Average:
    """An average with the standard deviation over the posterior.

    Attributes:
        mean: over members, [...].
        std: over members, (M-1)-normalised, [...].
        by_member: [M, ...].
        effective_frames: of each member, [M]; empty where nothing was reweighted.
    """

    mean: Array
    std: Array
    by_member: Array
    effective_frames: Array


def over_members(by_member: Sequence[Array] | Array) -> Average:
    """Return mean and std of averages that the members made themselves, [M, ...]."""
    values = np.asarray(by_member, dtype=float)
    if len(values) < 2:
        raise InputError(f"a standard deviation needs at least 2 members, got {len(values)}")
    return Average(values.mean(axis=0), values.std(axis=0, ddof=1), values, np.empty(0))


def reweighted(
    potential: BayesianPotential,
    frames: Sequence[Atoms],
    observable: Callable[[Atoms], float | Array],
    temperature: float,
    *,
    members: int = 8,
    seed: int = 0,
) -> Average:
    """Average an observable under every member, from one trajectory of the posterior means.

    Args:
        potential: that made the trajectory with method "map".
        frames: of its equilibrium, at constant temperature and volume.
        observable: a number or an array of each frame.
        temperature: K.
        members: M.
        seed: of the draws.
    """
    if not temperature > 0:
        raise InputError(f"the temperature is {temperature} K; expected a positive number")
    values = np.asarray([observable(frame) for frame in frames], dtype=float)  # [T, ...]
    mean_energy = potential.predict(frames, method="map", forces=False).array("energy")  # [T]
    averages, effective = [], []
    for member in potential.draw(members, seed=seed):
        energy = member.predict(frames, forces=False).array("energy")
        weights = normalised_weights(energy - mean_energy, temperature)  # [T]
        averages.append(np.tensordot(weights, values, axes=1))
        effective.append(1.0 / np.square(weights).sum())
    found = over_members(averages)
    return Average(found.mean, found.std, found.by_member, np.asarray(effective))


def normalised_weights(energy_difference: Array, temperature: float) -> Array:
    """Compute weights exp(-dE / kT) that sum to one, [T]; eV and K."""
    exponents = -np.asarray(energy_difference) / (kB * temperature)
    weights = np.exp(exponents - exponents.max())
    return weights / weights.sum()


def radial_distribution(atoms: Atoms, largest: float, bins: int) -> Array:
    """Compute g(r) of all pairs up to `largest` (A) in a periodic structure, [bins]."""
    from vesin import NeighborList

    if not atoms.pbc.all():
        raise InputError("g(r) needs a density: a structure that is periodic in three directions")
    (distance,) = NeighborList(cutoff=largest, full_list=True, sorted=False).compute(
        atoms.positions, atoms.cell.array, atoms.pbc, "d"
    )
    counts, edges = np.histogram(distance, bins=bins, range=(0.0, largest))
    shells = 4.0 / 3.0 * np.pi * np.diff(edges**3)
    return counts * atoms.get_volume() / (len(atoms) ** 2 * shells)
