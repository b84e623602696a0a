"""What workers do with a model: trajectories and screening.

Both are functions of the job alone: the model's file with its digest, structures and seeds.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.md.langevin import Langevin
from ase.md.md import MolecularDynamics
from ase.md.nptberendsen import NPTBerendsen

from blips import keys
from blips.active.config import CLOSED_FORM, ExploreConfig, LimitsConfig, SelectConfig
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
from blips.sim.guard import Guard, results_with
from blips.train.checkpoint import load

WATER_COMPRESSIBILITY = 4.6e-5  # 1/bar; how quickly a barostat answers, not where it ends
GUARD_SAMPLES = 8
AT_FIRST = 2.0  # times the force std where it begins may a trajectory go, in any case
SOFT = ("force_std",)  # limits beyond which candidates are only put last


@dataclass(frozen=True)
class Model:
    """A trained model as workers find it: its file, and the digest that the file must have."""

    path: str
    digest: str

    @property
    def target(self) -> Path:
        """The file of the rows of target structures, beside the model, for all workers."""
        return Path(self.path).with_name("target.npz")


def file_digest(path: str | Path) -> str:
    """Compute the SHA-256 of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@lru_cache(maxsize=1)
def potential_of(model: Model) -> BayesianPotential:
    """Load a model; the last one that this process used is kept."""
    found = load(model.path) if file_digest(model.path) == model.digest else None
    if not isinstance(found, BayesianPotential):
        raise CampaignError(f"{model.path} is not the model that the campaign trained; delete it")
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread within the block, so that results do not depend on the machine."""
    with kept_num_threads():
        torch.set_num_threads(1)
        yield


def walk(job: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Run a guarded trajectory, restart where the guard stops it; return frames and origins.

    The job has: model, start (structure), temperature (K), pressure (GPa, None for constant
    volume), seed (numbers), walker, explore, limits, soft (whether that of the std is automatic),
    typical_force (of labels, eV/A).
    """
    explore: ExploreConfig = job["explore"]
    origin = {"walker": job["walker"], "temperature": job["temperature"]}
    if job["pressure"] is not None:
        origin["pressure"] = job["pressure"]
    with one_thread():
        atoms, rng = from_json(job["start"]), np.random.default_rng(job["seed"])
        atoms.calc = _calculator(job, atoms)
        guard, start, begun = _guard(job, atoms), atoms.copy(), 0
        frames: list[tuple[str, dict[str, Any]]] = []

        def keep(step: int) -> None:
            if step > 0 or not frames:
                frames.append((to_json(atoms), {**origin, "step": begun + step}))

        while begun < explore.steps:
            atoms.set_cell(start.cell)
            atoms.positions[:] = start.positions
            dynamics = _dynamics(atoms, job, rng)
            left, every = explore.steps - begun, explore.every
            outcome = run_guarded(dynamics, left, guard, every=every, progress=keep)
            begun += max(outcome.steps, every)
            if outcome.stopped:
                frames[-1][1]["guard"] = outcome.reason
        return frames


def _guard(job: Mapping[str, Any], start: Atoms) -> Guard:
    """Make a trajectory's guard; the automatic force-std limit lets every trajectory begin."""
    limits = job["limits"].model_dump(exclude={"force"})
    high = limits.pop("force_std")
    if job["soft"] and high is not None:
        name = keys.FORCES_UNCERTAINTY
        std = np.linalg.norm(results_with(start, [name])[name], axis=1)
        high = max(high, AT_FIRST * float(std.max()))
    return Guard(high=high, **limits)


def _calculator(job: Mapping[str, Any], start: Atoms) -> Calculator:
    """Return the calculator: the plain model, or a member of its posterior.

    Members of a model that has learned little differ from it by more than any force that was ever
    labelled, and tear a structure apart within a few steps. Such a member is brought nearer to the
    mean, v -> t v, until its forces on the start differ by no more (root mean square): it is still
    smooth and conservative, and a draw of a narrower posterior.
    """
    model = potential_of(job["model"])
    if job["explore"].potential == "mean":
        return Calculator(model, method="map", samples=GUARD_SAMPLES)
    member = model.member(job["walker"])
    plain = model.predict(start, method="map").array("forces")
    change = member.predict(start).array("forces") - plain
    largest, deviation = job["typical_force"], float(np.sqrt((change**2).mean()))
    if deviation > largest and isinstance(member.noise, torch.Tensor):
        member = Member(model, member.noise * (largest / deviation))
    return Calculator(model, method="frozen", member=member, samples=GUARD_SAMPLES)


def _dynamics(atoms: Atoms, job: Mapping[str, Any], rng: np.random.Generator) -> MolecularDynamics:
    """Make the dynamics, with momenta of the Maxwell-Boltzmann distribution."""
    explore, temperature, pressure = job["explore"], job["temperature"], job["pressure"]
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

    The job has: model, structures, select, limits (with numbers), seed.
    """
    limits: LimitsConfig = job["limits"]
    guard = Guard(closest=limits.closest, farthest=limits.farthest)
    structures = [from_json(text) for text in job["structures"]]
    with one_thread():
        findings = [guard.check(atoms) for atoms in structures]
        both = zip(structures, findings, strict=True)
        rows = iter(_scores(job, [atoms for atoms, found in both if not found]))
    scores: list[dict[str, float] | None] = []
    excluded: list[str | None] = []
    for found in findings:
        row = None if found else next(rows)
        reason = found[0].limit if found else _beyond(row, limits)
        scores.append(row if reason in (None, *SOFT) else None)
        excluded.append(reason)
    return {"scores": scores, "excluded": excluded}


def _beyond(row: Mapping[str, float] | None, limits: LimitsConfig) -> str | None:
    """Return the name of a limit that a candidate exceeds, if any."""
    if row is None:
        return "not finite"
    scores = {"force": "force", "energy_std_per_atom": "energy_std", "force_std": "force_std"}
    for name, score in scores.items():
        limit = getattr(limits, name)
        if isinstance(limit, float) and row[score] > limit:
            return name
    return None


def _scores(job: Mapping[str, Any], structures: Sequence[Atoms]) -> list[dict[str, float] | None]:
    """Score each candidate; None where the model's outputs are not finite."""
    if not structures:
        return []
    try:
        scores = _scores_of_batch(structures, job["model"], job["select"], job["seed"])
    except InputError:
        if len(structures) == 1:
            return [None]
        return [row for atoms in structures for row in _scores(job, [atoms])]
    columns = (map(float, values) for values in scores.values())
    rows = [dict(zip(scores, values, strict=True)) for values in zip(*columns, strict=True)]
    return [row if np.isfinite(list(row.values())).all() else None for row in rows]


def _scores_of_batch(
    structures: Sequence[Atoms], model: Model, select: SelectConfig, seed: int
) -> dict[str, np.ndarray]:
    potential = potential_of(model)
    prediction = potential.predict(
        structures, samples=select.samples, method=select.method, seed=seed
    )
    first = np.concatenate([[0], np.cumsum(prediction.n_atoms)[:-1]]).astype(int)
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
            scores["expected_reduction"] = expected_reduction(rows, read_target(model))
    return scores


def read_target(model: Model) -> np.ndarray:
    """Read the rows T of target structures, [t, d]."""
    with np.load(model.target) as found:
        return target_rows(found["forces"], found["energies"])
