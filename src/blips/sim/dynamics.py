"""Molecular dynamics under a guard.

    atoms.calc = blips.Calculator(potential, method="map")
    dynamics = Langevin(atoms, 0.5 * fs, temperature_K=300, friction=0.01 / fs, fixcm=False)
    outcome = run_guarded(dynamics, steps=10_000, guard=Guard(force_std=0.3), every=10)

What happens at a finding is the action: "stop"; "log" (save the frame, go on); or "ask" (let a
reference calculator decide: go on while the potential's true force error stays below a limit).
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
from ase import Atoms
from ase.md.md import MolecularDynamics

from blips.errors import InputError
from blips.sim.calculator import snapshot
from blips.sim.guard import Finding, Guard

ACTIONS = ("stop", "log", "ask")


@dataclass(frozen=True)
class Event:
    """A finding of the guard, and what a reference calculator said, if one was asked."""

    step: int
    finding: Finding
    reference_error: float | None = None  # largest atomic force error, eV/A


@dataclass
class Outcome:
    """How a guarded run ended.

    Attributes:
        steps: done.
        stopped: by the guard.
        interrupted: by `before_step`.
        events: all findings, in order.
        frames: structures of the findings, with the calculator's results.
    """

    steps: int = 0
    stopped: bool = False
    interrupted: bool = False
    events: list[Event] = field(default_factory=list)
    frames: list[Atoms] = field(default_factory=list)

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
    action: str = "stop",
    reference: Any = None,
    reference_limit: float = 0.5,
    frames_file: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
    before_step: Callable[[int], bool] | None = None,
) -> Outcome:
    """Run until the steps are done or the guard stops it.

    Args:
        dynamics: an ASE dynamics whose atoms have a `blips.Calculator`.
        steps: at most.
        guard: the limits.
        every: steps between two looks.
        action: "stop", "log" or "ask".
        reference: ASE calculator for "ask".
        reference_limit: "ask": stop when the largest atomic force error exceeds this, eV/A.
        frames_file: extxyz file that structures with findings are appended to.
        progress: called with the number of steps done, after every look.
        before_step: called with the number of steps done before each one, to change the
            temperature for instance; False ends the run.
    """
    check_run(action, reference, every, steps)
    atoms, outcome = dynamics.atoms, Outcome()

    def look() -> bool:
        """Whether to go on."""
        findings = guard.check(atoms)
        if not findings:
            return True
        error = _reference_error(atoms, reference) if action == "ask" else None
        outcome.events += [Event(outcome.steps, finding, error) for finding in findings]
        frame = frame_of(atoms, outcome.steps, findings)
        outcome.frames.append(frame)
        if frames_file is not None:
            append_frame(frames_file, frame)
        exploded = any(finding.limit not in _STD_LIMITS for finding in findings)
        return not (exploded or action == "stop" or (error or 0.0) > reference_limit)

    going = look()
    if progress is not None:
        progress(0)
    while going and outcome.steps < steps and not outcome.interrupted:
        before = outcome.steps
        while outcome.steps < min(before + every, steps) and not outcome.interrupted:
            if before_step is not None and not before_step(outcome.steps):
                outcome.interrupted = True
            else:
                dynamics.run(1)
                outcome.steps += 1
        if outcome.steps > before:
            going = look()
            if progress is not None:
                progress(outcome.steps)
    outcome.stopped = not going
    return outcome


_STD_LIMITS = ("force_std", "energy_std_per_atom")


def append_frame(file: str | Path, frame: Atoms) -> None:
    """Append a structure to an extxyz file, in one piece."""
    text = io.StringIO()
    ase.io.write(text, frame, format="extxyz")
    with Path(file).open("a") as opened:
        opened.write(text.getvalue())


def frame_of(atoms: Atoms, step: int, findings: list[Finding]) -> Atoms:
    """Copy a structure with its results and the findings about it."""
    frame = snapshot(atoms)
    frame.info["step"] = step
    frame.info["guard"] = "; ".join(finding.text for finding in findings)
    return frame


def _reference_error(atoms: Atoms, reference: Any) -> float:
    true_forces = reference.get_forces(atoms.copy())
    return float(
        np.linalg.norm(atoms.get_forces(apply_constraint=False) - true_forces, axis=1).max()
    )


def check_run(action: str, reference: Any, every: int, steps: int) -> None:
    """Refuse arguments of `run_guarded` that no run can be made of."""
    if action not in ACTIONS:
        raise InputError(f"unknown action {action!r}; use one of {', '.join(ACTIONS)}")
    if action == "ask" and reference is None:
        raise InputError('action "ask" needs a reference calculator: pass reference=...')
    if every < 1 or steps < 0:
        raise InputError(f"steps is {steps} and every is {every}; expected >= 0 and >= 1")
