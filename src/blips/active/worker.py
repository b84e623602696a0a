"""What workers do with a model: trajectories and screening. JSON in, JSON out.

Both are functions of the job alone: the model's file with its digest, structures and seeds.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.md.langevin import Langevin
from ase.md.md import MolecularDynamics
from ase.md.nptberendsen import NPTBerendsen

from blips import keys
from blips.active.config import CLOSED_FORM, ExploreConfig, LimitsConfig
from blips.active.database import CampaignError
from blips.active.evidence import candidate_rows
from blips.active.frames import from_json, to_json
from blips.active.rules import expected_reduction, information, target_rows
from blips.errors import InputError
from blips.inference.monte_carlo import kept_num_threads
from blips.inference.sampling import Member
from blips.potential import BayesianPotential
from blips.sim.calculator import Calculator
from blips.sim.dynamics import run_guarded
from blips.sim.guard import Guard
from blips.train.checkpoint import load

WATER_COMPRESSIBILITY = 4.6e-5  # 1/bar; how quickly a barostat answers, not where it ends
GUARD_SAMPLES = 8
AT_FIRST = 2.0  # times the force std where it begins may a trajectory go, in any case
SOFT = ("force_std",)  # limits beyond which candidates are only put last
_models: dict[str, BayesianPotential] = {}  # the last model that this process used


def file_digest(path: str | Path) -> str:
    """Compute the SHA-256 of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def model_of(job: Mapping[str, Any]) -> BayesianPotential:
    """Return the model of a job, cached if it was the last one."""
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread within the block, so that results do not depend on the machine."""
    with kept_num_threads():
        torch.set_num_threads(1)
        yield


def walk(job: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Run a guarded trajectory, restart where the guard stops it; return frames and origins.

    The job has: model, digest, start (structure), temperature (K), pressure (GPa, None for
    constant volume), seed (numbers), walker, explore, limits, soft (whether that of the std is
    automatic), typical_force (of labels, eV/A).
    """
    with one_thread():
        explore = ExploreConfig.model_validate(job["explore"])
        atoms, rng = from_json(job["start"]), np.random.default_rng(job["seed"])
        atoms.calc = _calculator(job, explore, atoms)
        guard, start, begun = _guard(job, atoms), atoms.copy(), 0
        frames: list[tuple[str, dict[str, Any]]] = []

        def keep(step: int) -> None:
            origin = {"walker": job["walker"], "temperature": job["temperature"]}
            if job["pressure"] is not None:
                origin["pressure"] = job["pressure"]
            if step > 0 or not frames:
                frames.append((to_json(atoms), {**origin, "step": begun + step}))

        while begun < explore.steps:
            atoms.set_cell(start.cell)
            atoms.positions[:] = start.positions
            dynamics = _dynamics(atoms, explore, job, rng)
            left, every = explore.steps - begun, explore.every
            outcome = run_guarded(dynamics, left, guard, every=every, progress=keep)
            begun += max(outcome.steps, every)
            if outcome.stopped:
                frames[-1][1]["guard"] = outcome.reason
        return frames


def _guard(job: Mapping[str, Any], start: Atoms) -> Guard:
    """Make a trajectory's guard; the automatic force-std limit lets every trajectory begin."""
    limits = {name: value for name, value in job["limits"].items() if name != "force"}
    high = limits.pop("force_std", None)
    if job["soft"] and high is not None and start.calc is not None:
        std = np.linalg.norm(start.calc.get_property(keys.FORCES_UNCERTAINTY, start), axis=1)
        high = max(high, AT_FIRST * float(std.max()))
    return Guard(high=high, **limits)


def _calculator(job: Mapping[str, Any], explore: ExploreConfig, start: Atoms) -> Calculator:
    """Return the calculator: the plain model, or a member of its posterior.

    Members of a model that has learned little differ from it by more than any force that was ever
    labelled, and tear a structure apart within a few steps. Such a member is brought nearer to the
    mean, v -> t v, until its forces on the start differ by no more (root mean square): it is still
    smooth and conservative, and a draw of a narrower posterior.
    """
    model = model_of(job)
    if explore.potential == "mean":
        return Calculator(model, method="map", samples=GUARD_SAMPLES)
    member = model.member(job["walker"])
    plain = model.predict(start, method="map").array("forces")
    change = member.predict(start).array("forces") - plain
    largest, deviation = job["typical_force"], float(np.sqrt((change**2).mean()))
    if deviation > largest and isinstance(member.noise, torch.Tensor):
        member = Member(model, member.noise * (largest / deviation))
    return Calculator(model, method="frozen", member=member, samples=GUARD_SAMPLES)


def _dynamics(
    atoms: Atoms, explore: ExploreConfig, job: Mapping[str, Any], rng: np.random.Generator
) -> MolecularDynamics:
    """Make the dynamics, with momenta of the Maxwell-Boltzmann distribution."""
    temperature, pressure = job["temperature"], job["pressure"]
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


def screen(job: dict[str, Any]) -> dict[str, Any]:
    """Score a chunk of candidates: name -> value, None where thrown out; and the reasons for it.

    The job has: model, digest, structures, samples, method, seed, limits, rule, rows, target (file
    of the rows of target structures, for expected_reduction).
    """
    with one_thread():
        limits = LimitsConfig.model_validate(job["limits"])
        structures = [from_json(text) for text in job["structures"]]
        guard = Guard(closest=limits.closest, farthest=limits.farthest)
        excluded: list[str | None] = []
        for atoms in structures:
            findings = guard.check(atoms)
            excluded.append(findings[0].limit if findings else None)
        sound = [i for i, reason in enumerate(excluded) if reason is None]
        scores: list[dict[str, float] | None] = [None] * len(structures)
        rows = _scores(job, [structures[i] for i in sound])
        for i, row in zip(sound, rows, strict=True):
            excluded[i] = "not finite" if row is None else _beyond(row, limits)
            scores[i] = row if excluded[i] in (None, *SOFT) else None
        return {"scores": scores, "excluded": excluded}


def _scores(job: Mapping[str, Any], structures: Sequence[Atoms]) -> list[dict[str, float] | None]:
    """Score each candidate; None where the model's outputs are not finite."""
    if not structures:
        return []
    try:
        scores = _scores_of_batch(job, structures)
    except InputError:
        if len(structures) == 1:
            return [None]
        return [row for atoms in structures for row in _scores(job, [atoms])]
    rows = [
        {name: float(values[place]) for name, values in scores.items()}
        for place in range(len(structures))
    ]
    return [row if np.isfinite(list(row.values())).all() else None for row in rows]


def _scores_of_batch(job: Mapping[str, Any], structures: Sequence[Atoms]) -> dict[str, np.ndarray]:
    model = model_of(job)
    prediction = model.predict(
        structures, samples=job["samples"], method=job["method"], seed=job["seed"]
    )
    first = np.concatenate([[0], np.cumsum(prediction.n_atoms)[:-1]]).astype(int)
    components = prediction.array("forces_total_std")  # [N, 3]
    std = np.linalg.norm(components, axis=1)  # [N]
    force = np.linalg.norm(prediction.array("forces"), axis=1)  # [N]
    scores = {
        "energy_std": prediction.array("energy_total_std") / prediction.n_atoms,
        "force_std": np.maximum.reduceat(std, first),
        "force": np.maximum.reduceat(force, first),
        "mean_std": np.add.reduceat(components.mean(axis=1), first) / prediction.n_atoms,
        "atoms": prediction.n_atoms,
    }
    if job["rule"] in CLOSED_FORM:
        rows = candidate_rows(model, structures, rows=job["rows"], seed=job["seed"])
        scores["information"] = information(rows)
        if job["rule"] == "expected_reduction":
            scores["expected_reduction"] = expected_reduction(rows, read_target(job["target"]))
    return scores


def read_target(path: str | Path) -> np.ndarray:
    """Read the rows T of target structures, [t, d]."""
    with np.load(path) as found:
        return target_rows(found["forces"], found["energies"])


def _beyond(row: Mapping[str, float], limits: LimitsConfig) -> str | None:
    """Return the name of a limit that a candidate exceeds."""
    scores = {"force": "force", "energy_std_per_atom": "energy_std", "force_std": "force_std"}
    for name, score in scores.items():
        limit = getattr(limits, name)
        if isinstance(limit, float) and row[score] > limit:
            return name
    return None
