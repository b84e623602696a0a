r"""Averages over trajectories; the model's error bar and that of finite time are kept apart.

Every member of the posterior is a potential of its own, with its own equilibrium.

* An average of equilibrium under member m, such as g(r), follows from a trajectory of the plain
  model by reweighting,

      <A>_m = sum_t w_t A_t / sum_t w_t,      w_t = exp(-(E_m(t) - E_0(t)) / kT)

  while the effective number of frames, (sum w)^2 / sum w^2, stays large. Where it does not, run the
  members themselves (`blips.Calculator(potential, method="frozen", member=m)`) and give their
  averages to `over_members`. The error of time comes from the means of blocks.
* Displacements and diffusion follow from no weights: every member runs its own trajectory. The
  spread over them has both errors in it, var(members) = var(model) + var(time), so that the
  model's is what is left when that of time, from parts of each trajectory, is taken off.

`std` of a property is the model's, `details["time_std"]` that of time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ase import Atoms
from ase.units import kB
from vesin import NeighborList

from blips.errors import InputError
from blips.potential import BayesianPotential
from blips.properties.result import Properties, Property

Array = np.ndarray
BLOCKS, PARTS = 8, 4
FEWEST_FRAMES = 10.0  # effective ones, below which reweighting says nothing
CM2_PER_S = 0.1  # of A^2/fs


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


def over_members(
    by_member: Sequence[Array] | Array, effective_frames: Array | None = None
) -> Average:
    """Return mean and std of averages that the members made themselves, [M, ...]."""
    values = np.asarray(by_member, dtype=float)
    if len(values) < 2:
        raise InputError(f"a standard deviation needs at least 2 members, got {len(values)}")
    frames = np.empty(0) if effective_frames is None else effective_frames
    return Average(values.mean(axis=0), values.std(axis=0, ddof=1), values, frames)


def reweighted(
    potential: BayesianPotential,
    frames: Sequence[Atoms],
    observable: Callable[[Atoms], float | Array] | Array,
    temperature: float,
    *,
    members: int = 8,
    seed: int = 0,
) -> Average:
    """Average an observable under every member, from one trajectory of the posterior means.

    Args:
        potential: that made the trajectory with method "map".
        frames: of its equilibrium, at constant temperature and volume.
        observable: a number or an array of each frame, or its values [T, ...].
        temperature: K.
        members: M.
        seed: of the draws.
    """
    if not temperature > 0:
        raise InputError(f"the temperature is {temperature} K; expected a positive number")
    values = [observable(frame) for frame in frames] if callable(observable) else observable
    mean_energy = potential.predict(frames, method="map", forces=False).array("energy")  # [T]
    averages, effective = [], []
    for member in potential.draw(members, seed=seed):
        energy = member.predict(frames, forces=False).array("energy")
        weights = normalised_weights(energy - mean_energy, temperature)  # [T]
        averages.append(np.tensordot(weights, np.asarray(values, dtype=float), axes=1))
        effective.append(1.0 / np.square(weights).sum())
    return over_members(averages, np.asarray(effective))


def normalised_weights(energy_difference: Array, temperature: float) -> Array:
    """Compute weights exp(-dE / kT) that sum to one, [T]; eV and K."""
    exponents = -np.asarray(energy_difference) / (kB * temperature)
    weights = np.exp(exponents - exponents.max())
    return weights / weights.sum()


def radial_distribution(atoms: Atoms, largest: float, bins: int) -> Array:
    """Compute g(r) of all pairs up to `largest` (A) in a periodic structure, [bins]."""
    if not atoms.pbc.all():
        raise InputError("g(r) needs a density: a structure that is periodic in three directions")
    (distance,) = NeighborList(cutoff=largest, full_list=True, sorted=False).compute(
        atoms.positions, atoms.cell.array, atoms.pbc, "d"
    )
    counts, edges = np.histogram(distance, bins=bins, range=(0.0, largest))
    shells = 4.0 / 3.0 * np.pi * np.diff(edges**3)
    return counts * atoms.get_volume() / (len(atoms) ** 2 * shells)


def distribution(
    potential: BayesianPotential,
    frames: Sequence[Atoms],
    temperature: float,
    *,
    largest: float = 6.0,
    bins: int = 60,
    members: int = 16,
    seed: int = 0,
) -> Properties:
    """Compute the radial distribution function of a trajectory, [bins], up to `largest` (A).

    The other arguments are those of `reweighted`. Members whose weights leave too few frames are
    failures: run them.
    """
    _check_length(frames)
    name = "radial_distribution"
    values = np.array([radial_distribution(frame, largest, bins) for frame in frames])
    found = reweighted(potential, frames, values, temperature, members=members, seed=seed)
    usable = found.effective_frames >= FEWEST_FRAMES
    failures = {
        int(k): f"its weights leave {found.effective_frames[k]:.1f} effective frames; run it"
        for k in np.flatnonzero(~usable)
    }
    one = Property.of(name, values.mean(axis=0), found.by_member[usable], "")
    details = {
        "time_std": {name: time_std(values)},
        "distances": (np.arange(bins) + 0.5) * largest / bins,
        "effective_frames": found.effective_frames,
    }
    return Properties("dynamics", "reweighted", {name: one}, failures, details)


def diffusion(
    mean: Sequence[Atoms], members: Sequence[Sequence[Atoms]], interval: float
) -> Properties:
    """Compute mean squared displacement (A^2) and diffusion coefficient (cm^2/s) of all atoms.

    Args:
        mean: trajectory of the plain model, positions not wrapped.
        members: trajectories of members, as long as it.
        interval: between frames, fs.

    Returns:
        `displacement` [lags] and `diffusion`; `details["lags"]` in fs.
    """
    if len(members) < 2 or any(len(one) != len(mean) for one in members):
        raise InputError("diffusion needs trajectories of at least 2 members, all of one length")
    _check_length(mean)
    paths = [np.array([frame.positions for frame in one]) for one in (mean, *members)]
    count = len(mean) // (2 * PARTS)  # the same lags in the whole and in its parts

    def displacement(path: Array) -> Array:
        return mean_squared_displacement(path, count)

    def coefficient(path: Array) -> Array:
        return np.array(slope(displacement(path)) / 6 / interval * CM2_PER_S)

    quantities: dict[str, Property] = {}
    time: dict[str, Any] = {}
    for name, units, of in (
        ("displacement", "A^2", displacement),
        ("diffusion", "cm^2/s", coefficient),
    ):
        value, *values = (of(path) for path in paths)
        parts = np.array([[of(part) for part in np.array_split(path, PARTS)] for path in paths])
        time[name] = np.sqrt(parts.var(axis=1, ddof=1).mean(axis=0) / PARTS)
        var = np.var(values, axis=0, ddof=1) - time[name] ** 2
        std = np.sqrt(np.clip(var, 0.0, None))
        scalar = np.ndim(value) == 0
        value, std = (float(value), float(std)) if scalar else (value, std)
        quantities[name] = Property(name, value, std, np.array(values), units)
    lags = np.arange(1, count + 1) * interval
    return Properties("dynamics", "members", quantities, {}, {"time_std": time, "lags": lags})


def mean_squared_displacement(path: Array, count: int) -> Array:
    """Average over atoms and time origins, drift removed, [T, N, 3] -> [count] A^2."""
    path = path - path.mean(axis=1, keepdims=True)
    return np.array(
        [np.square(path[lag:] - path[:-lag]).sum(axis=2).mean() for lag in range(1, count + 1)]
    )


def slope(displacement: Array) -> float:
    """Compute the slope of the later half of a displacement, per frame."""
    lags = np.arange(1, len(displacement) + 1)
    later = slice(len(lags) // 2, None)
    return float(np.polyfit(lags[later], displacement[later], 1)[0])


def time_std(values: Array, blocks: int = BLOCKS) -> Array:
    """Estimate the standard error of a mean over correlated frames [T, ...], by blocks."""
    means = np.array([part.mean(axis=0) for part in np.array_split(values, blocks)])
    return means.std(axis=0, ddof=1) / np.sqrt(blocks)


def _check_length(frames: Sequence[Atoms]) -> None:
    if len(frames) < 4 * BLOCKS:
        raise InputError(f"{len(frames)} frames; error bars of time need at least {4 * BLOCKS}")
