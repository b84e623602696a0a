"""What does simulating molecules in one batch (TorchSim) save over one after the other (ASE)?

NVE dynamics of copies of NH3 with PaiNN (64 features, 3 blocks) at posterior means, one thread,
processor time of ten steps, in turn within one run; without and with a guard that looks once.

Run ``python -m benchmarks.batched --output results/benchmarks/batched``.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.build import molecule
from ase.md.velocitydistribution import thermalize_momenta
from ase.md.verlet import VelocityVerlet
from ase.units import fs

import blips
from benchmarks.measure import measure
from blips.backbones import PaiNN
from blips.potential import BayesianPotential
from blips.sim.guard import Guard
from blips.sim.torchsim import TorchSimModel, ts
from blips.train.run import environment

STEPS = 10


def copies(count: int) -> list[Atoms]:
    """Make copies of ammonia, each with momenta of its own."""
    found = []
    for seed in range(count):
        atoms = molecule("NH3")
        thermalize_momenta(atoms, 300, rng=np.random.default_rng(seed))
        found.append(atoms)
    return found


def alone(potential: BayesianPotential, structures: list[Atoms]) -> Callable[[], None]:
    """Run each structure by itself, with ASE."""

    def run() -> None:
        for one in structures:
            atoms = one.copy()
            atoms.calc = blips.Calculator(potential, method="map")
            VelocityVerlet(atoms, 0.5 * fs).run(STEPS)

    return run


def together(
    potential: BayesianPotential, structures: list[Atoms], guard: Guard
) -> Callable[[], None]:
    """Run all structures in one batch."""
    model = TorchSimModel(potential, samples=8)

    def run() -> None:
        state: Any = ts.initialize_state(
            [one.copy() for one in structures], model.device, model.dtype
        )
        momenta = np.concatenate([one.get_momenta() for one in structures])
        state.momenta = torch.tensor(momenta)
        dt = torch.tensor(0.5e-3 * ts.units.UnitSystem.metal.time, dtype=model.dtype)
        make: Any = ts.nve
        init, update = make(model, dt=dt, kT=torch.tensor(0.025))
        state = init(state)  # the momenta that are there stay
        for _ in range(STEPS):
            state = update(state)
        model.check(state, guard)

    return run


def main() -> None:
    """Measure and write a .json and a .md file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(cutoff=5.0, features=64, blocks=3))
    rows = []
    for count in (1, 8, 32):
        structures = copies(count)
        calls = {
            "alone": alone(potential, structures),
            "together": together(potential, structures, Guard(closest=None)),
            "guarded": together(potential, structures, Guard(high=1e9)),
        }
        measured = measure(calls, options.repeats)
        ratios = {name: round(measured.ratio(name, "alone"), 3) for name in ("together", "guarded")}
        rows.append({"structures": count, **ratios})
    options.output.parent.mkdir(parents=True, exist_ok=True)
    report = {"rows": rows, "steps": STEPS, "environment": environment()}
    options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    lines = [
        "| structures | one batch / one by one | the same with a guard (8 samples per 10 steps) |",
        "|---|---|---|",
        *(f"| {r['structures']} | {r['together']} | {r['guarded']} |" for r in rows),
    ]
    options.output.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
