r"""Averages of dynamics, with two error bars kept apart: the model's, and that of finite time.

* g(r) is an average of equilibrium: members reweight the plain model's frames (`sim.averages`), and
  the error of time comes from the means of blocks.
* Displacements and diffusion follow from no weights: every member runs its own trajectory. The
  spread over them has both errors in it, var(members) = var(model) + var(time), so that the
  model's is what is left when that of time, from parts of each trajectory, is taken off.

`std` of a quantity is the model's, `details["time_std"]` that of time.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from ase import Atoms

from blips.errors import InputError
from blips.potential import BayesianPotential
from blips.properties.result import Properties, Property
from blips.sim.averages import radial_distribution, reweighted

Array = np.ndarray
BLOCKS, PARTS = 8, 4
FEWEST_FRAMES = 10.0  # effective ones, below which reweighting says nothing
CM2_PER_S = 0.1  # of A^2/fs


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
    """Compute the radial distribution function of a trajectory, [bins].

    Args:
        potential: that made the frames, by its means.
        frames: of equilibrium, at constant temperature and volume.
        temperature: K.
        largest: distance, A.
        bins: of equal width up to it.
        members: K.
        seed: of the draws.

    Returns:
        `radial_distribution`. Members whose weights leave too few frames are failures: run them.
    """
    _check_length(frames)
    values = np.array([radial_distribution(frame, largest, bins) for frame in frames])
    cached = {id(frame): value for frame, value in zip(frames, values, strict=True)}
    found = reweighted(
        potential, frames, lambda frame: cached[id(frame)], temperature, members=members, seed=seed
    )
    usable = found.effective_frames >= FEWEST_FRAMES
    failures = {
        int(k): f"its weights leave {found.effective_frames[k]:.1f} effective frames; run it"
        for k in np.flatnonzero(~usable)
    }
    name = "radial_distribution"
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
    lags = np.arange(1, count + 1) * interval

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
        values = [of(path) for path in paths]
        parts = np.array([[of(part) for part in np.array_split(path, PARTS)] for path in paths])
        error = np.sqrt(parts.var(axis=1, ddof=1).mean(axis=0) / PARTS)
        plain = Property.of(name, values[0], np.array(values[1:]), units)
        spread = np.var(plain.members, axis=0, ddof=1)
        std = np.sqrt(np.clip(spread - error**2, 0.0, None))
        std = std if np.ndim(std) else float(std)
        quantities[name] = Property(name, plain.value, std, plain.members, units)
        time[name] = error
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
