r"""Averages over trajectories; the model's error bar and that of finite time are kept apart.

Every member of the posterior is a potential of its own, with its own equilibrium.

* An average of equilibrium under member m, such as g(r), follows from a trajectory of the plain
  model by reweighting,

      <A>_m = sum_t w_t A_t / sum_t w_t,      w_t = exp(-(E_m(t) - E_0(t)) / kT)

  while the effective number of frames, (sum w)^2 / sum w^2, stays large. Where it does not, run the
  members themselves. The error of time comes from the means of blocks.
* Displacements and diffusion follow from no weights: every member runs its own trajectory. The
  spread over them has both errors in it, var(members) = var(model) + var(time), so that the
  model's is what is left when that of time, from parts of each trajectory, is taken off.

`dynamics` runs the trajectories; the functions below it take any. `std` of a property is the
model's, `details["time_std"]` that of time.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from ase import Atoms
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import thermalize_momenta
from ase.units import fs, kB
from scipy.special import softmax

from blips.data.neighbours import search
from blips.errors import InputError
from blips.potential import BayesianPotential
from blips.properties.calculation import Calculation
from blips.properties.result import Properties, Property, PropertyError
from blips.sim.calculator import Calculator

Array = np.ndarray
BLOCKS, PARTS = 8, 4
FEWEST_FRAMES = 10.0  # effective ones, below which reweighting says nothing
CM2_PER_S = 0.1  # of A^2/fs
LARGEST, BINS = 6.0, 60  # A, of radial distributions
DISTANCES = (np.arange(BINS) + 0.5) * LARGEST / BINS
STEPS, EVERY = 5000, 10  # of a trajectory, and between its frames
FRICTION = 1e-3  # 1/fs, of Langevin dynamics: weak, as it slows diffusion down
HOT = 10.0  # times the temperature, above which a trajectory has flown apart


def dynamics(
    potential: BayesianPotential,
    atoms: Atoms | Sequence[Atoms],
    *,
    temperature: float = 300.0,
    timestep: float = 1.0,
    **options: Any,
) -> Properties:
    """Run Langevin dynamics at constant volume and average over it, without its first fifth.

    `atoms` is where to start (velocities are drawn), or a trajectory of the plain model in
    equilibrium at constant volume, to reweight. Temperature in K, timestep in fs. Options are those
    of `Calculation`; `steps` are those of each trajectory. Method "linear" reweights one of the
    plain model; members whose weights leave too few frames are failures: run them. With "members"
    all run their own, see `averages`.
    """
    run = Calculation(potential, **{"steps": STEPS, **options})
    if not (temperature > 0 and timestep > 0):
        raise InputError(f"{temperature} K and {timestep} fs; expected positive numbers")

    given = [] if isinstance(atoms, Atoms) else list(atoms)
    if given and run.method == "members":
        raise InputError('a trajectory is reweighted by method="linear"; members need a structure')
    start = atoms if isinstance(atoms, Atoms) else given[-1]

    def trajectory(noise: int, **kind: Any) -> list[Atoms]:
        here, rng = start.copy(), np.random.default_rng([run.seed, noise])
        here.calc = Calculator(potential, seed=run.seed, **kind)
        thermalize_momenta(here, temperature, exact_temperature=False, rng=rng)
        thermostat = {"temperature_K": temperature, "friction": FRICTION / fs, "rng": rng}
        mover = Langevin(here, timestep * fs, fixcm=False, **thermostat)
        here.get_forces()  # mistakes of the structure show here; those below are of the dynamics
        frames: list[Atoms] = []
        while mover.nsteps < run.steps:
            try:
                mover.run(EVERY)
            except InputError as error:
                raise PropertyError(f"the trajectory flew apart: {error}") from error
            if not here.get_temperature() < HOT * temperature:
                raise PropertyError(f"the trajectory flew apart after {mover.nsteps} steps")
            frames.append(here.copy())
        return frames[len(frames) // 5 :]

    mean = given or trajectory(0, method="map")
    _check_length(mean)
    if run.method == "linear":
        return _reweighted_pairs(run, mean, temperature)
    own, failures = run.of_each(  # with noise of their own: errors of time are independent
        lambda number: trajectory(number + 1, method="frozen", member=number)
    )
    if len(own) < 2:
        raise PropertyError(
            f"{len(failures)} of {run.members} members have no trajectory: {failures}"
        )
    return replace(averages(mean, own, EVERY * timestep), failures=failures)


def _reweighted_pairs(run: Calculation, frames: Sequence[Atoms], temperature: float) -> Properties:
    """Compute the radial distribution function of a trajectory, reweighted to the members."""
    name, options = "radial_distribution", {"members": run.members, "seed": run.seed}
    values = np.array([radial_distribution(frame, LARGEST, BINS) for frame in frames])
    found, effective = reweighted(run.potential, frames, values, temperature, **options)
    usable = effective >= FEWEST_FRAMES
    failures = {
        int(k): f"its weights leave {effective[k]:.1f} effective frames; run it"
        for k in np.flatnonzero(~usable)
    }
    one = Property.of(name, values.mean(axis=0), found[usable], "")
    details = {
        "time_std": {name: time_std(values)},
        "distances": DISTANCES,
        "effective_frames": effective,
    }
    return Properties("dynamics", "reweighted", {name: one}, failures, details)


def reweighted(
    potential: BayesianPotential,
    frames: Sequence[Atoms],
    observable: Callable[[Atoms], float | Array] | Array,
    temperature: float,
    *,
    members: int = 8,
    seed: int = 0,
) -> tuple[Array, Array]:
    """Average an observable under every member, from one trajectory of the posterior means.

    The potential made the frames with method "map", in equilibrium at constant temperature (K) and
    volume. The observable is a number or an array of each frame, or its values [T, ...].

    Returns:
        The members' averages [M, ...], and the effective frames behind each, [M].
    """
    if not temperature > 0:
        raise InputError(f"the temperature is {temperature} K; expected a positive number")
    values = [observable(frame) for frame in frames] if callable(observable) else observable
    mean_energy = potential.predict(frames, method="map", forces=False).array("energy")  # [T]
    averages, effective = [], []
    for member in potential.draw(members, seed=seed):
        energy = member.predict(frames, forces=False).array("energy")
        weights = softmax((mean_energy - energy) / (kB * temperature))  # [T]
        averages.append(np.tensordot(weights, np.asarray(values, dtype=float), axes=1))
        effective.append(1.0 / np.square(weights).sum())
    return np.array(averages), np.array(effective)


def radial_distribution(atoms: Atoms, largest: float, bins: int) -> Array:
    """Compute g(r) of all pairs up to `largest` (A) in a periodic structure, [bins]."""
    if not atoms.pbc.all():
        raise InputError("g(r) needs a density: a structure that is periodic in three directions")
    (distance,) = search(atoms, largest, "d")
    counts, edges = np.histogram(distance, bins=bins, range=(0.0, largest))
    shells = 4.0 / 3.0 * np.pi * np.diff(edges**3)
    return counts * atoms.get_volume() / (len(atoms) ** 2 * shells)


def averages(
    mean: Sequence[Atoms], members: Sequence[Sequence[Atoms]], interval: float
) -> Properties:
    """Compute averages of trajectories that the plain model and members ran themselves.

    Trajectories are of one length, positions not wrapped; `interval` is between frames, fs.

    Returns:
        Mean squared `displacement` [lags] of all atoms, `diffusion` and, where all is periodic,
        `radial_distribution` [bins]; `details` has the lags in fs and the distances.
    """
    if len(members) < 2 or any(len(one) != len(mean) for one in members):
        raise InputError("averages need trajectories of at least 2 members, all of one length")
    _check_length(mean)
    runs = (mean, *members)
    paths = [np.array([frame.positions for frame in one]) for one in runs]
    count = len(mean) // (2 * PARTS)  # the same lags in the whole and in its parts

    def displacement(path: Array) -> Array:
        return mean_squared_displacement(path, count)

    def coefficient(path: Array) -> float:
        return slope(displacement(path)) / 6 / interval * CM2_PER_S

    quantities: dict[str, Property] = {}
    details: dict[str, Any] = {"time_std": {}, "distances": DISTANCES}
    details["lags"] = np.arange(1, count + 1) * interval

    def add(name: str, units: str, of: Callable[[Array], Array | float], data: list[Array]) -> None:
        values = np.array([of(one) for one in data])
        value, of_members = values[0], values[1:]
        parts = np.array([[of(part) for part in np.array_split(one, PARTS)] for one in data])
        time = np.sqrt(parts.var(axis=1, ddof=1).mean(axis=0) / PARTS)
        std = np.sqrt(np.clip(of_members.var(axis=0, ddof=1) - time**2, 0.0, None))
        quantities[name] = Property(name, value, std, of_members, units)
        details["time_std"][name] = time

    add("displacement", "A^2", displacement, paths)
    add("diffusion", "cm^2/s", coefficient, paths)
    if mean[0].pbc.all():
        pairs = [np.array([radial_distribution(f, LARGEST, BINS) for f in one]) for one in runs]
        add("radial_distribution", "", lambda g: g.mean(axis=0), pairs)
    error = details["time_std"]["diffusion"]
    details["notes"] = [f"finite time, on top: diffusion ± {error:.2g} cm^2/s"]
    return Properties("dynamics", "members", quantities, {}, details)


def mean_squared_displacement(path: Array, count: int) -> Array:
    """Average over atoms and time origins, drift removed, [T, N, 3] -> [count] A^2."""
    path = path - path.mean(axis=1, keepdims=True)
    return np.array(
        [np.square(path[lag:] - path[:-lag]).sum(axis=2).mean() for lag in range(1, count + 1)]
    )


def slope(displacement: Array) -> float:
    """Compute the slope of the later half of a displacement, per frame."""
    lags = np.arange(len(displacement) // 2, len(displacement))
    return float(np.polyfit(lags + 1, displacement[lags], 1)[0])


def time_std(values: Array, blocks: int = BLOCKS) -> Array:
    """Estimate the standard error of a mean over correlated frames [T, ...], by blocks."""
    means = np.array([part.mean(axis=0) for part in np.array_split(values, blocks)])
    return means.std(axis=0, ddof=1) / np.sqrt(blocks)


def _check_length(frames: Sequence[Atoms]) -> None:
    if len(frames) < 4 * BLOCKS:
        raise InputError(f"{len(frames)} frames; error bars of time need at least {4 * BLOCKS}")
