"""What workers do with a model: trajectories and screening. JSON in, JSON out.

Both are functions of the job alone: the model's file with its digest, structures and seeds.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.md.langevin import Langevin
from ase.md.md import MolecularDynamics
from ase.md.nptberendsen import NPTBerendsen

from blips.active.acquisition import structure_scores
from blips.active.config import BoundsConfig, ExploreConfig
from blips.active.database import CampaignError
from blips.active.frames import from_json, to_json
from blips.errors import InputError
from blips.inference.monte_carlo import kept_num_threads
from blips.potential import BayesianPotential
from blips.sim.calculator import Calculator
from blips.sim.dynamics import run_guarded
from blips.sim.guard import Guard
from blips.train.checkpoint import load

WATER_COMPRESSIBILITY = 4.6e-5  # 1/bar; how quickly a barostat answers, not where it ends
GUARD_SAMPLES = 8
_models: dict[str, BayesianPotential] = {}  # the last model that this process used


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def model_of(job: Mapping[str, Any]) -> BayesianPotential:
    """The model of a job, from memory where it was the last one."""
    path, digest = job["model"], job["digest"]
    if digest not in _models:
        if file_digest(path) != digest:
            raise CampaignError(f"{path} is not the model that the campaign trained; delete it")
        model = load(path)
        if not isinstance(model, BayesianPotential):
            raise CampaignError(f"{path} holds no Bayesian potential")
        _models.clear()
        _models[digest] = model
    return _models[digest]


def walk(job: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Frames of a guarded trajectory.

    Args:
        job: model, digest, start (structure), temperature (K), pressure (GPa, None for constant
            volume), seed (numbers), walker, explore.

    Returns:
        Structures and their origins.
    """
    with kept_num_threads():
        torch.set_num_threads(1)
        explore = ExploreConfig.model_validate(job["explore"])
        atoms, rng = from_json(job["start"]), np.random.default_rng(job["seed"])
        frozen = explore.potential == "frozen"
        atoms.calc = Calculator(
            model_of(job),
            method="frozen" if frozen else "map",
            member=job["walker"],
            samples=GUARD_SAMPLES,
        )
        _set_velocities(atoms, job["temperature"], rng)
        frames: list[tuple[str, dict[str, Any]]] = []

        def keep(step: int) -> None:
            origin = {"walker": job["walker"], "temperature": job["temperature"], "step": step}
            if job["pressure"] is not None:
                origin["pressure"] = job["pressure"]
            frames.append((to_json(atoms), origin))

        dynamics = _dynamics(atoms, explore, job["temperature"], job["pressure"], rng)
        guard = Guard(**explore.guard.model_dump())
        outcome = run_guarded(dynamics, explore.steps, guard, every=explore.every, progress=keep)
        if outcome.stopped and frames:
            frames[-1][1]["guard"] = outcome.reason
        return frames


def _set_velocities(atoms: Atoms, temperature: float, rng: np.random.Generator) -> None:
    """Momenta of the Maxwell-Boltzmann distribution."""
    width = np.sqrt(atoms.get_masses() * units.kB * temperature)  # [N]
    atoms.set_momenta(width[:, None] * rng.standard_normal((len(atoms), 3)))


def _dynamics(
    atoms: Atoms,
    explore: ExploreConfig,
    temperature: float,
    pressure: float | None,
    rng: np.random.Generator,
) -> MolecularDynamics:
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


def screen(job: dict[str, Any]) -> dict[str, Any]:
    """Scores of a chunk of candidates.

    Args:
        job: model, digest, structures, samples, method, seed, bounds.

    Returns:
        scores: name -> values, None where thrown out; excluded: reason or None, for each.
    """
    with kept_num_threads():
        torch.set_num_threads(1)
        bounds = BoundsConfig.model_validate(job["bounds"])
        structures = [from_json(text) for text in job["structures"]]
        guard = Guard(closest=bounds.closest, farthest=bounds.farthest)
        excluded: list[str | None] = []
        for atoms in structures:
            findings = guard.check(atoms)
            excluded.append(findings[0].limit if findings else None)
        sound = [i for i, reason in enumerate(excluded) if reason is None]
        rows: list[dict[str, float] | None] = [None] * len(structures)
        for i, row in zip(sound, _rows(job, [structures[i] for i in sound]), strict=True):
            excluded[i] = "not finite" if row is None else _beyond(row, bounds)
            rows[i] = row if excluded[i] is None else None
        return {"scores": rows, "excluded": excluded}


def _rows(job: Mapping[str, Any], structures: Sequence[Atoms]) -> list[dict[str, float] | None]:
    """Scores of each structure; None where the model has no numbers for it."""
    if not structures:
        return []
    try:
        scores = _scores(job, structures)
    except InputError:
        if len(structures) == 1:
            return [None]
        return [row for atoms in structures for row in _rows(job, [atoms])]
    return [
        {name: float(values[place]) for name, values in scores.items()}
        for place in range(len(structures))
    ]


def _scores(job: Mapping[str, Any], structures: Sequence[Atoms]) -> dict[str, np.ndarray]:
    prediction = model_of(job).predict(
        structures, samples=job["samples"], method=job["method"], seed=job["seed"]
    )
    return structure_scores(
        prediction.n_atoms,
        prediction.array("energy_total_std"),
        prediction.array("forces_total_std"),
        prediction.array("forces"),
    )


def _beyond(row: Mapping[str, float], bounds: BoundsConfig) -> str | None:
    """Name of a bound that a candidate exceeds."""
    limits = {
        "force_std": (row["force_std_max"], bounds.force_std),
        "energy_std_per_atom": (row["energy_std"], bounds.energy_std_per_atom),
        "force": (row["force_max"], bounds.force),
    }
    if not all(np.isfinite(value) for value, _ in limits.values()):
        return "not finite"
    for name, (value, limit) in limits.items():
        if limit is not None and value > limit:
            return name
    return None


def member_deviations(job: dict[str, Any]) -> list[np.ndarray]:
    """Deviations of frozen members from their mean, in units of the noise of labels.

    Args:
        job: model, digest, structures, samples, seed, energy_noise (eV/atom), force_noise (eV/A).

    Returns:
        Of each structure the energy per atom and all forces, [K, 1 + 3 N].
    """
    with kept_num_threads():
        torch.set_num_threads(1)
        structures = [from_json(text) for text in job["structures"]]
        members = model_of(job).draw(job["samples"], seed=job["seed"])
        predictions = [member.predict(structures) for member in members]
        num_atoms = np.array([len(atoms) for atoms in structures])
        energies = np.stack([p.array("energy") / num_atoms for p in predictions])  # [K, S]
        energies = (energies - energies.mean(0)) / job["energy_noise"]
        forces = np.stack([p.array("forces") for p in predictions])  # [K, N, 3]
        forces = (forces - forces.mean(0)) / job["force_noise"]
        parts = np.split(forces, np.cumsum(num_atoms)[:-1], axis=1)
        return [
            np.concatenate([energy[:, None], part.reshape(len(members), -1)], axis=1)
            for energy, part in zip(energies.T, parts, strict=True)
        ]
