"""Measure what a neighbour list kept between MD steps (Verlet skin) saves.

    python benchmarks/neighbours.py --output results/benchmarks/neighbours

Copper at 600 K moves under ASE's EMT with steps of 2 fs. Along the same trajectory graphs are built
with every skin, and forces predicted by an untrained PaiNN (cutoff 5 A, posterior means, the
cheapest way through `blips.Calculator`) without a skin. Times are of the process, on one thread;
every skin sees the same load, in an order that is drawn anew at every step.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.md.velocitydistribution import thermalize_momenta
from ase.md.verlet import VelocityVerlet
from ase.units import fs

import blips
from blips.backbones import PaiNN
from blips.data.graph import AtomGraph
from blips.data.neighbours import SKIN, NeighbourCache

CUTOFF = 5.0
SKINS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
REPEATS = {36: (3, 3, 1), 144: (3, 3, 4), 360: (6, 5, 3), 720: (6, 6, 5)}
STEPS = 100


def trajectory(repeat: tuple[int, int, int], steps: int) -> list[Atoms]:
    """Run NVE dynamics from a rattled crystal at 600 K; return its frames."""
    atoms = bulk("Cu", cubic=True) * repeat
    atoms.calc = EMT()
    atoms.rattle(0.08, seed=0)
    thermalize_momenta(atoms, 600.0, rng=np.random.default_rng(0))
    frames: list[Atoms] = []
    dynamics = VelocityVerlet(atoms, 2.0 * fs)
    dynamics.attach(lambda: frames.append(atoms.copy()))
    dynamics.run(steps)
    return frames


def cpu_ms(function: Callable[[], object]) -> float:
    """Return the time of the process in ms."""
    start = time.process_time()
    function()
    return 1e3 * (time.process_time() - start)


def measure(repeat: tuple[int, int, int], steps: int) -> dict[str, object]:
    """Measure mean times of graphs for every skin, and of a whole step without one."""
    frames, rng = trajectory(repeat, steps), np.random.default_rng(1)
    caches = {skin: NeighbourCache(skin) for skin in SKINS}
    graph_ms: dict[float, list[float]] = {skin: [] for skin in SKINS}
    for frame in frames:
        for skin in rng.permutation(SKINS):
            cache = caches[float(skin)]
            build = lambda c=cache, f=frame: AtomGraph.from_atoms(f, CUTOFF, torch.float32, c)  # noqa: E731
            graph_ms[float(skin)].append(cpu_ms(build))
    calculator = blips.Calculator(blips.bayesianize(PaiNN(cutoff=CUTOFF)), method="map", skin=0.0)
    some = frames[:: max(1, len(frames) // 10)]
    step_ms = [cpu_ms(lambda f=frame: calculator.get_forces(f)) for frame in some]
    return {
        "atoms": len(frames[0]),
        "graph_ms": {str(skin): mean(times[1:]) for skin, times in graph_ms.items()},
        "searches": {str(skin): cache.searches for skin, cache in caches.items() if skin},
        "step_ms": mean(step_ms[1:]),
    }


def table(rows: list[dict]) -> str:
    """Format graph times relative to a fresh search, and what a step gains, as Markdown."""
    head = "| atoms | step (ms) | fresh graph (ms) | share of a step |"
    head += "".join(f" skin {skin:g} |" for skin in SKINS[1:]) + f" step with {SKIN:g} / without |"
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    for row in rows:
        graph = {float(skin): ms for skin, ms in row["graph_ms"].items()}
        fresh, step = graph[0.0], row["step_ms"]
        cells = [f"{row['atoms']}", f"{step:.1f}", f"{fresh:.2f}", f"{100 * fresh / step:.1f} %"]
        cells += [f"{graph[skin] / fresh:.2f}" for skin in SKINS[1:]]
        cells.append(f"{1 - (fresh - graph[SKIN]) / step:.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("results/benchmarks/neighbours"))
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(repeat, options.steps) for repeat in REPEATS.values()]
    text = (
        "# Neighbour lists kept between MD steps\n\n"
        f"{table(rows)}\n\nColumns `skin` are times of graphs over those of a fresh search, on "
        f"average over {options.steps} steps of copper at 600 K, 2 fs, cutoff {CUTOFF:g} A. The "
        "step is one of PaiNN's posterior means (`benchmarks/neighbours.py`), CPU time of one "
        "thread.\n"
    )
    options.output.with_suffix(".md").write_text(text)
    options.output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
