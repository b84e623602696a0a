"""Molecular dynamics under a guard.

    atoms.calc = blips.Calculator(potential, method="map")
    dynamics = Langevin(atoms, 0.5 * fs, temperature_K=300, friction=0.01 / fs, fixcm=False)
    outcome = run_guarded(dynamics, steps=10_000, guard=Guard(low=0.1, high=0.3), every=10)

Frames above `low` are saved; above `high` the run stops, or, where there is a reference calculator,
it is asked: the run goes on while the potential's true force error stays below a limit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ase import Atoms
from ase.md.md import MolecularDynamics

from blips.errors import InputError
from blips.sim.frames import FrameSaver
from blips.sim.guard import Finding, Guard


@dataclass(frozen=True)
class Event:
    """A finding of the guard, and what a reference calculator said, if one was asked."""

    step: int
    finding: Finding
    reference_error: float | None = None  # largest atomic force error, eV/A


@dataclass
class Outcome:
    """How a guarded run ended."""

    steps: int = 0  # done
    stopped: bool = False  # by the guard
    interrupted: bool = False  # by `before_step`
    events: list[Event] = field(default_factory=list)  # all findings, in order
    frames: list[Atoms] = field(default_factory=list)  # that were saved, with results

    @property
    def reason(self) -> str:
        """Why the run was stopped; empty if it was not."""
        return self.events[-1].finding.text if self.stopped else ""


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
    before_step: Callable[[int], bool] = lambda step: True,
) -> Outcome:
    """Run until the steps are done or the guard stops it.

    Args:
        dynamics: an ASE dynamics whose atoms have a `blips.Calculator`.
        steps: at most.
        guard: the limits.
        every: steps between two looks.
        saver: of frames with findings; by default they are kept in memory.
        reference: ASE calculator to ask above `high` (exploded geometries stop in any case).
        reference_limit: largest true force error of an atom that the run goes on with, eV/A.
        progress: called with the number of steps done, after every look.
        before_step: called with the number of steps done before each one, to change the
            temperature for instance; False ends the run.
    """
    check_run(every, steps)
    saver = saver or FrameSaver()
    atoms, outcome = dynamics.atoms, Outcome(frames=saver.frames)

    def look() -> bool:
        """Check the structure; return whether to go on."""
        findings = guard.check(atoms)
        if not findings:
            return True
        stops = any(finding.stops for finding in findings)
        error = None
        if stops and reference is not None and np.isfinite(atoms.positions).all():
            error = _reference_error(atoms, reference)
            exploded = any(finding.limit not in STD_LIMITS for finding in findings)
            stops = exploded or not error <= reference_limit
        saved = saver.offer(atoms, outcome.steps, findings, last=stops)
        if saved or error is not None:
            outcome.events += [Event(outcome.steps, finding, error) for finding in findings]
        return not stops

    going = look()
    progress(0)
    while going and outcome.steps < steps and not outcome.interrupted:
        before = outcome.steps
        while outcome.steps < min(before + every, steps) and not outcome.interrupted:
            outcome.interrupted = not before_step(outcome.steps)
            if not outcome.interrupted:
                dynamics.run(1)
                outcome.steps += 1
        if outcome.steps > before:
            going = look()
            progress(outcome.steps)
    outcome.stopped = not going
    return outcome


STD_LIMITS = ("force_std", "energy_std_per_atom")


def _reference_error(atoms: Atoms, reference: Any) -> float:
    true_forces = reference.get_forces(atoms.copy())
    return float(
        np.linalg.norm(atoms.get_forces(apply_constraint=False) - true_forces, axis=1).max()
    )


def check_run(every: int, steps: int) -> None:
    """Refuse arguments of `run_guarded` that no run can be made of."""
    if every < 1 or steps < 0:
        raise InputError(f"steps is {steps} and every is {every}; expected >= 0 and >= 1")
