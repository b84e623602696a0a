"""What workers do with a model: trajectories and screening.

Both are functions of the job alone: the model's file, structures and seeds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.md.langevin import Langevin
from ase.md.md import MolecularDynamics
from ase.md.nptberendsen import NPTBerendsen

from blips import keys
from blips.active.config import CLOSED_FORM, CampaignConfig, ExploreConfig, LimitsConfig
from blips.active.evidence import candidate_rows
from blips.active.frames import from_json, to_json
from blips.active.rules import expected_reduction, information, target_rows
from blips.errors import InputError
from blips.inference.monte_carlo import kept_num_threads
from blips.inference.sampling import Member
from blips.potential import BayesianPotential
from blips.sim.calculator import Calculator
from blips.sim.dynamics import run_guarded
from blips.sim.guard import Guard, results_with
from blips.train.released import load_once

WATER_COMPRESSIBILITY = 4.6e-5  # 1/bar; how quickly a barostat answers, not where it ends
GUARD_SAMPLES = 8
AT_FIRST = 2.0  # times the force std where it begins may a trajectory go, in any case
TARGET = "target.npz"  # rows of target structures, beside the model, for all workers
Scores = dict[str, float]  # of a candidate, by name


@kept_num_threads(1)
def walk(
    start: tuple[int, str],
    *,
    model: Path,
    config: CampaignConfig,
    round: int,
    largest_std: float | None,
    typical_force: float,
) -> list[tuple[str, dict[str, Any]]]:
    """Run a guarded trajectory, restart where the guard stops it; return frames and origins.

    `start` is its number and its structure, `largest_std` the limit of the force std, a number also
    where it is "auto", and `typical_force` that of the labels, eV/A.
    """
    walker, structure = start
    explore, potential = config.explore, load_once(model)
    temperature, pressure = explore.conditions(walker)
    origin = {"walker": walker, "temperature": temperature}
    if pressure is not None:
        origin["pressure"] = pressure
    atoms = from_json(structure)
    rng = np.random.default_rng([config.seed, 2, round, walker])
    atoms.calc = Calculator(potential, "map", samples=GUARD_SAMPLES)
    if explore.potential == "member":
        member = _member(potential, walker, atoms.copy(), typical_force)
        atoms.calc = Calculator(potential, "frozen", member=member, samples=GUARD_SAMPLES)
    guard = _guard(config.limits, atoms, largest_std)
    begin, begun = atoms.copy(), 0
    frames: list[tuple[str, dict[str, Any]]] = []

    def keep(step: int) -> None:
        if step > 0 or not frames:
            frames.append((to_json(atoms), {**origin, "step": begun + step}))

    while begun < explore.steps:
        atoms.set_cell(begin.cell)
        atoms.positions[:] = begin.positions
        dynamics = _dynamics(atoms, explore, walker, rng)
        left, every = explore.steps - begun, explore.every
        outcome = run_guarded(dynamics, left, guard, every=every, progress=keep)
        begun += max(outcome.steps, every)
        if outcome.stopped:
            frames[-1][1]["guard"] = outcome.reason
    return frames


def _guard(limits: LimitsConfig, start: Atoms, high: float | None) -> Guard:
    """Make a trajectory's guard; an automatic limit of the force std lets each of them begin."""
    if limits.force_std == "auto" and high is not None:
        name = keys.FORCES_UNCERTAINTY
        std = np.linalg.norm(results_with(start, [name])[name], axis=1)
        high = max(high, AT_FIRST * float(std.max()))
    return Guard(high=high, **limits.model_dump(exclude={"force", "force_std"}))


def _member(model: BayesianPotential, number: int, start: Atoms, typical_force: float) -> Member:
    """Draw a member of the posterior, near enough to its mean.

    Members of a model that has learned little differ from it by more than any force that was ever
    labelled, and tear a structure apart within a few steps. Such a member is brought nearer to the
    mean, v -> t v, until its forces on the start differ by no more (root mean square): it is still
    smooth and conservative, and a draw of a narrower posterior.
    """
    member = model.member(number)
    plain = model.predict(start, method="map").array("forces")
    change = member.predict(start).array("forces") - plain
    deviation = float(np.sqrt((change**2).mean()))
    if deviation > typical_force and isinstance(member.noise, torch.Tensor):
        return Member(model, member.noise * (typical_force / deviation))
    return member


def _dynamics(
    atoms: Atoms, explore: ExploreConfig, walker: int, rng: np.random.Generator
) -> MolecularDynamics:
    """Make the dynamics, with momenta of the Maxwell-Boltzmann distribution."""
    temperature, pressure = explore.conditions(walker)
    width = np.sqrt(atoms.get_masses() * units.kB * temperature)  # [N]
    atoms.set_momenta(width[:, None] * rng.standard_normal((len(atoms), 3)))
    timestep = explore.timestep * units.fs
    if pressure is None:
        friction = explore.friction / units.fs
        return Langevin(
            atoms, timestep, temperature_K=temperature, friction=friction, fixcm=False, rng=rng
        )
    if not atoms.pbc.all():
        raise InputError("explore.pressure is for periodic structures; leave it out for molecules")
    return NPTBerendsen(
        atoms,
        timestep,
        temperature_K=temperature,
        pressure_au=pressure * units.GPa,
        taut=100 * units.fs,
        taup=500 * units.fs,
        compressibility_au=WATER_COMPRESSIBILITY / units.bar,
    )


@kept_num_threads(1)
def screen(
    structures: Mapping[int, str], *, model: Path, config: CampaignConfig, largest_std: float | None
) -> list[tuple[int, Scores | None, str | None]]:
    """Score candidates: number, scores if there are any, and what excludes it, if anything.

    The limit of the force std is `largest_std`; the rule of the configuration is not "auto".
    """
    limits = config.limits
    highest = {"force": limits.force, "energy_std_per_atom": limits.energy_std_per_atom}
    highest["force_std"] = largest_std
    guard = Guard(closest=limits.closest, farthest=limits.farthest)
    atoms = {number: from_json(text) for number, text in structures.items()}
    broken = {k: found[0].limit for k, one in atoms.items() if (found := guard.check(one))}
    sound = [k for k in atoms if k not in broken]
    rows = _scores([atoms[k] for k in sound], model, config)
    scores = dict(zip(sound, rows, strict=True))
    return [(k, scores.get(k), broken.get(k) or _beyond(scores[k], highest)) for k in atoms]


def _beyond(scores: Scores | None, highest: Mapping[str, float | None]) -> str | None:
    """Return the name of a limit that a candidate exceeds, if any."""
    if scores is None:
        return "not finite"
    found = {**scores, "energy_std_per_atom": scores["energy_std"]}
    beyond = (name for name, limit in highest.items() if limit is not None and found[name] > limit)
    return next(beyond, None)


def _scores(
    structures: Sequence[Atoms], model: Path, config: CampaignConfig
) -> list[Scores | None]:
    """Score each candidate; None where the model's outputs are not finite."""
    if not structures:
        return []
    try:
        columns = _scores_of_batch(structures, model, config)
    except InputError:
        if len(structures) == 1:
            return [None]
        return [row for atoms in structures for row in _scores([atoms], model, config)]
    values = np.array([*columns.values()], dtype=float).T  # [c, scores]
    rows = [dict(zip(columns, row, strict=True)) for row in values.tolist()]
    return [row if np.isfinite([*row.values()]).all() else None for row in rows]


def _scores_of_batch(
    structures: Sequence[Atoms], model: Path, config: CampaignConfig
) -> dict[str, np.ndarray]:
    select, seed, potential = config.select, config.seed, load_once(model)
    prediction = potential.predict(
        structures, samples=select.samples, method=select.method, seed=seed
    )
    first = np.cumsum(prediction.n_atoms) - prediction.n_atoms
    force = np.linalg.norm(prediction.array("forces"), axis=1)  # [N]
    mean_std = prediction.array("forces_total_std").mean(axis=1)  # [N]
    scores = {
        "energy_std": prediction.array("energy_total_std") / prediction.n_atoms,
        "force_std": prediction.array("largest_force_std"),
        "force": np.maximum.reduceat(force, first),
        "mean_std": np.add.reduceat(mean_std, first) / prediction.n_atoms,
        "atoms": prediction.n_atoms,
    }
    if select.rule in CLOSED_FORM:
        rows = candidate_rows(potential, structures, rows=select.rows, seed=seed)
        scores["information"] = information(rows)
        if select.rule == "expected_reduction":
            target = target_rows(*read_target(model))
            scores["expected_reduction"] = expected_reduction(rows, target)
    return scores


def read_target(model: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read the rows of target structures, of forces [t, d] and of energies per atom [s, d]."""
    with np.load(model.with_name(TARGET)) as found:
        return found["forces"], found["energies"]
