"""Molecular dynamics under a guard, and in a folder.

    atoms.calc = blips.Calculator(potential, method="map")
    dynamics = Langevin(atoms, 0.5 * fs, temperature_K=300, friction=0.01 / fs, fixcm=False)
    outcome = run_guarded(dynamics, steps=10_000, guard=Guard(low=0.1, high=0.3), every=10)

`run_md` is what `blips md` does. The temperature of its thermostat is T, or goes linearly from T to
`to` over the steps. It leaves

trajectory.extxyz    a frame at every look of the guard: momenta, energy, forces, and std
uncertain.extxyz     frames for labelling that the guard found, with std and the reason
outcome.json         how the run ended
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from ase import Atoms
from ase.md.langevin import Langevin
from ase.md.langevinbaoab import LangevinBAOAB
from ase.md.md import MolecularDynamics
from ase.md.velocitydistribution import thermalize_momenta
from ase.md.verlet import VelocityVerlet
from ase.units import GPa, fs
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from blips.config import Section
from blips.defaults import SAMPLES
from blips.errors import InputError, refuse_below
from blips.files import write_json
from blips.prediction import Model
from blips.progress import track
from blips.sim.calculator import Calculator, snapshot
from blips.sim.frames import FrameSaver, append_frame
from blips.sim.guard import Finding, Guard, stop_reason

FILES = ("trajectory.extxyz", "uncertain.extxyz", "outcome.json")


@dataclass(frozen=True, kw_only=True)
class Event(Finding):
    """A finding in a run, and what a reference calculator said, if one was asked."""

    step: int
    reference_error: float | None  # largest atomic force error, eV/A


@dataclass
class Outcome:
    """How a guarded run ended."""

    steps: int = 0  # done
    stopped: bool = False  # by the guard
    interrupted: bool = False  # by `should_end`
    events: list[Event] = field(default_factory=list)  # all findings, in order
    frames: list[Atoms] = field(default_factory=list)  # that were saved, with results

    @property
    def reason(self) -> str:
        """Why the run was stopped; empty if it was not."""
        return self.events[-1].text if self.stopped else ""


def run_guarded(
    dynamics: MolecularDynamics,
    steps: int,
    guard: Guard,
    *,
    every: int = 10,
    saver: FrameSaver | None = None,
    reference: Any = None,
    reference_limit: float = 0.5,
    progress: Callable[[int], object] = lambda step: None,
    should_end: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run until the steps are done or the guard stops it.

    The atoms of the dynamics have a `blips.Calculator`; the guard looks at them every `every`
    steps. Frames with findings go to the saver, by default one that keeps them in memory.

    The reference is an ASE calculator to ask above `high`; the run goes on with a true force error
    of up to `reference_limit`, eV/A. Exploded geometries, and atoms outside the domain, stop
    unasked. `progress` is called with the number of steps done after every look; `should_end` is
    asked before each step.
    """
    refuse_below(1, every=every)
    refuse_below(0, steps=steps)
    saver = saver or FrameSaver()
    atoms, outcome = dynamics.atoms, Outcome(frames=saver.frames)

    def look() -> None:
        findings, error = guard.check(atoms), None
        stops = bool(stop_reason(findings))
        of_std = {finding.limit for finding in findings} <= {"force_std", "energy_std_per_atom"}
        if stops and of_std and reference is not None:
            forces = atoms.get_forces(apply_constraint=False)
            errors = np.linalg.norm(forces - reference.get_forces(atoms.copy()), axis=1)
            error = float(errors.max())
            stops = not error <= reference_limit
        saved = findings and saver.offer(atoms, outcome.steps, findings, last=stops)
        if saved or error is not None:
            about = {"step": outcome.steps, "reference_error": error}
            outcome.events += [Event(**vars(finding), **about) for finding in findings]
        outcome.stopped = stops
        progress(outcome.steps)

    look()
    for step in track(range(1, steps + 1), "dynamics", steps):
        outcome.interrupted = not outcome.stopped and should_end()
        if outcome.stopped or outcome.interrupted:
            break
        dynamics.run(1)
        outcome.steps = step
        if step % every == 0 or step == steps:
            look()
    if outcome.interrupted and outcome.steps % every:
        look()
    return outcome


class MDSettings(Section):
    """Settings of a run."""

    temperature: PositiveFloat = 300.0  # K, of the thermostat at the start, and of drawn velocities
    to: PositiveFloat | None = None  # K, of the thermostat at the end; None keeps the temperature
    steps: NonNegativeInt = 1000
    timestep: PositiveFloat = 0.5  # fs
    ensemble: Literal["langevin", "nve", "npt"] = "langevin"  # npt: a cell that keeps its shape
    friction: PositiveFloat = 10.0  # 1/ps, of Langevin dynamics
    pressure: float = 0.0  # GPa, of "npt"
    method: str = "map"  # what drives the atoms: see `blips.Calculator`
    member: int = 0  # number of the draw, of method "frozen"
    samples: int = SAMPLES  # behind the std
    every: PositiveInt = 10  # steps between two looks of the guard, and frames of the trajectory
    save_every: int = 10  # least number of steps between two frames for labelling
    distinct: float = 0.1  # A, by which such frames differ at least, see `blips.sim.frames`
    reference_limit: float = 0.5  # largest atomic force error to go on with, eV/A
    seed: int = 0  # of velocities, thermostat and samples

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.pressure and self.ensemble != "npt":
            raise ValueError(f"pressure is {self.pressure} GPa; it goes with npt alone")
        if self.to is not None and self.ensemble == "nve":
            raise ValueError(
                "a ramp needs a thermostat: use the ensemble langevin or npt, or no ramp"
            )
        return self


def run_md(
    potential: Model,
    atoms: Atoms,
    settings: MDSettings,
    guard: Guard,
    folder: str | Path,
    *,
    reference: Any = None,
    overwrite: bool = False,
    should_end: Callable[[], bool] = lambda: False,
    progress: Callable[[Atoms], object] = lambda atoms: None,
) -> Outcome:
    """Run from a structure, with its velocities or, where it has none, with drawn ones.

    An earlier run in the folder is refused unless `overwrite`. The reference and `should_end` are
    those of `run_guarded`; `progress` is called with the structure at every look.
    """
    folder, atoms = Path(folder), atoms.copy()
    options = settings.model_dump(include={"method", "samples", "seed", "member"})
    atoms.calc = Calculator(potential, **options)
    rng = np.random.default_rng(settings.seed)
    if not atoms.get_momenta().any():
        thermalize_momenta(atoms, settings.temperature, exact_temperature=False, rng=rng)
    dynamics = _dynamics(atoms, settings, rng)
    paths = {name: folder / name for name in FILES}
    if (present := [name for name, path in paths.items() if path.exists()]) and not overwrite:
        raise InputError(
            f"{folder} holds {', '.join(present)} of an earlier run; choose another folder "
            "(--folder), or overwrite it (--overwrite)"
        )
    saver = FrameSaver(
        paths["uncertain.extxyz"], every=settings.save_every, distinct=settings.distinct
    )
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths.values():
        path.unlink(missing_ok=True)

    def after(step: int) -> None:
        frame = snapshot(atoms)
        frame.info["step"] = step
        append_frame(paths["trajectory.extxyz"], frame)
        progress(atoms)

    def heat(change: float) -> None:
        now = settings.temperature + change * dynamics.nsteps / max(1, settings.steps)
        dynamics.set_temperature(temperature_K=now)

    if settings.to is not None:
        dynamics.attach(heat, change=settings.to - settings.temperature)
    outcome = run_guarded(
        dynamics,
        settings.steps,
        guard,
        every=settings.every,
        saver=saver,
        reference=reference,
        reference_limit=settings.reference_limit,
        progress=after,
        should_end=should_end,
    )
    content = {
        "steps": outcome.steps,
        "time_fs": outcome.steps * settings.timestep,
        "stopped": outcome.stopped,
        "interrupted": outcome.interrupted,
        "reason": outcome.reason,
        "events": [vars(event) for event in outcome.events],
        "settings": settings.model_dump(),
        "guard": vars(guard),
        "files": {path.stem: str(path) for path in paths.values()},
    }
    write_json(paths["outcome.json"], content)
    return outcome


def _dynamics(atoms: Atoms, settings: MDSettings, rng: np.random.Generator) -> Any:
    timestep, temperature = settings.timestep * fs, settings.temperature
    if settings.ensemble == "nve":
        return VelocityVerlet(atoms, timestep)
    if settings.ensemble == "langevin":
        rate = settings.friction / (1000.0 * fs)
        return Langevin(
            atoms, timestep, temperature_K=temperature, friction=rate, fixcm=False, rng=rng
        )
    if not atoms.pbc.all():
        raise InputError("npt needs a cell that is periodic along all three directions")
    with warnings.catch_warnings():  # ASE tells the mass of the barostat that it chooses
        warnings.simplefilter("ignore")
        return LangevinBAOAB(
            atoms,
            timestep,
            temperature_K=temperature,
            externalstress=-settings.pressure * GPa,
            hydrostatic=True,
            T_tau=1000.0 * fs / settings.friction,  # that of the volume is 20 times as long
            rng=rng,
        )
