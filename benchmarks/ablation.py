"""Training steps and predictions of two source trees, in turn: what a change of speed costs.

One process for each tree, one thread, processor time; each figure is the median over repeats of
this tree's time over the other's. Which part of the former speed layer bought what is in
``results/benchmarks/ablation.md``, made by this script at commit 8481e62, where each could be
switched off. Compare with any commit:

    git worktree add ../before 8481e62 && (cd ../before && python setup.py build_ext --inplace)
    python benchmarks/ablation.py --before ../before/src --output results/benchmarks/ablation_after
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.spacegroup import crystal

import blips
from blips.backbones import PaiNN, load
from blips.config import load_config
from blips.data.dataset import StructureData
from blips.train.objective import Objective
from blips.train.run import environment

Call = Callable[[], Any]
LEAST_SECONDS = 0.1  # of calls that are timed together
SOURCES = Path(__file__).parents[1] / "src"


def nh3(seed: int) -> Atoms:
    """Make a displaced ammonia molecule with random labels."""
    return _labelled(molecule("NH3"), seed)


def silica(seed: int) -> Atoms:
    """Make a displaced cell of alpha quartz, 36 atoms, with random labels."""
    cell = crystal(
        ["Si", "O"],
        basis=[(0.4697, 0, 1 / 3), (0.4135, 0.2669, 0.7858)],
        spacegroup=152,
        cellpar=[4.916, 4.916, 5.4054, 90, 90, 120],
    )
    return _labelled(cell * (2, 2, 1), seed)


def _labelled(atoms: Atoms, seed: int) -> Atoms:
    rng = np.random.default_rng(seed)
    atoms.positions += rng.normal(scale=0.05, size=atoms.positions.shape)
    forces = rng.normal(size=atoms.positions.shape)
    atoms.calc = SinglePointCalculator(atoms, energy=rng.normal(), forces=forces)
    return atoms


def step(backbone: Any, structures: list[Atoms], *, noise: bool) -> Call:
    """Run forward and backward of a training step on energies and forces."""
    dtype = next(backbone.parameters()).dtype
    data = StructureData(structures, backbone.graph_of, dtype=dtype)
    batch, config = data.batch(range(len(structures))), {"loss": "mae", "noise": noise}
    objective = Objective(
        blips.bayesianize(backbone), load_config({"training": config}).training, 100
    )

    def run() -> None:
        objective.zero_grad()
        objective(batch, ("benchmark", 0), 1.0).total.backward()

    return run


def predict(build: Callable[[int], Atoms], conditioned: bool = False, **options: Any) -> Call:
    """Predict one structure by PaiNN."""
    model = blips.bayesianize(PaiNN())
    if conditioned:
        model.condition([build(k) for k in range(4)], valid=[build(k) for k in (4, 5)])
    graph: Any = model.backbone
    graph = graph.graph(build(9))
    return lambda: model.predict(graph, **options)


WORKLOADS: dict[str, Callable[[], Call]] = {
    "plain step, PaiNN, 8 NH3": lambda: step(PaiNN(), [nh3(k) for k in range(8)], noise=False),
    "plain step, PaiNN, 4 x 36 silica": lambda: step(
        PaiNN(), [silica(k) for k in range(4)], noise=False
    ),
    "noise step, PaiNN, 8 NH3": lambda: step(PaiNN(), [nh3(k) for k in range(8)], noise=True),
    "noise step, PaiNN, 4 x 36 silica": lambda: step(
        PaiNN(), [silica(k) for k in range(4)], noise=True
    ),
    "noise step, CHGNet, silica": lambda: step(load("chgnet"), [silica(0)], noise=True),
    "noise step, MatterSim, silica": lambda: step(load("mattersim-1m"), [silica(0)], noise=True),
    "predict map, PaiNN, NH3": lambda: predict(nh3, method="map"),
    "predict map, PaiNN, silica": lambda: predict(silica, method="map"),
    "predict conditioned 16, PaiNN, NH3": lambda: predict(nh3, True, samples=16),
    "predict conditioned 16, PaiNN, silica": lambda: predict(silica, True, samples=16),
    "predict mc 16, PaiNN, NH3": lambda: predict(nh3, method="mc", samples=16),
    "predict mc 16, PaiNN, silica": lambda: predict(silica, method="mc", samples=16),
}


def answer(workload: str) -> None:
    """Print the processor time of a call for every line that is read."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    call = WORKLOADS[workload]()
    for _ in sys.stdin:
        call()
        count, start = 0, time.process_time()
        while count == 0 or time.process_time() - start < LEAST_SECONDS:
            call()
            count += 1
        print((time.process_time() - start) / count, flush=True)


class Worker:
    """A process that runs one workload with the sources of one tree."""

    def __init__(self, workload: str, sources: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--work", workload],
            env={**os.environ, "PYTHONPATH": str(sources.resolve()), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self) -> float:
        """Measure the processor time of a call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def measure(workload: str, before: Path, repeats: int) -> dict[str, float]:
    """Measure seconds of both trees, and the median ratio; the first of each is warm-up."""
    workers = [Worker(workload, before), Worker(workload, SOURCES)]
    pairs = [[worker.seconds() for worker in workers] for _ in range(repeats + 1)][1:]
    for worker in workers:
        worker.process.communicate()
    old, new = (statistics.median(side) for side in zip(*pairs, strict=True))
    return {"before": old, "now": new, "ratio": statistics.median(b / a for a, b in pairs)}


def table(results: dict[str, dict[str, float]]) -> str:
    """Format the results as Markdown."""
    lines = ["| workload | before, ms | now, ms | now / before |", "|---|---|---|---|"]
    for workload, row in results.items():
        times = f"{1e3 * row['before']:.1f} | {1e3 * row['now']:.1f}"
        lines.append(f"| {workload} | {times} | {row['ratio']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write a .json and a .md file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="sources of the other tree")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="part of the names of workloads")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        answer(options.work)
        return
    results: dict[str, dict[str, float]] = {}
    for workload in [name for name in WORKLOADS if options.only in name]:
        results[workload] = measure(workload, options.before, options.repeats)
        print(table({workload: results[workload]}), flush=True)
    if options.output:
        commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True)
        content = {"results": results, "commit": commit.strip(), "environment": environment()}
        options.output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(table(results))


if __name__ == "__main__":
    main()
