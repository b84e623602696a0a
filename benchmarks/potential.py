"""Cost of a Bayesian potential relative to its plain backbone.

Every figure is a ratio of times measured in turn within one run, training on one thread (runs go
side by side), prediction on all that torch may use:

* ``training``: one optimisation step's forward and backward (energy + forces where the model is
  conservative), BLIP over the plain backbone. The local estimator works out the first map of EGNN's
  messages on nodes in place of pairs (`blips.bayes.pairs`), the plain model on pairs, as it is
  usually written: ``local, no node-wise maps`` does without, and ``local over node-wise plain``
  compares with a plain model that does the same;
* ``map``: a MAP prediction over the plain backbone's energy and forces;
* ``mc``: 32 posterior samples (energy + forces) over one MAP call.

Run ``python benchmarks/potential.py --output results/benchmarks`` to write potential.json and
potential.md.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.spacegroup import crystal
from torch import Tensor, nn

import blips
from blips import keys
from blips.backbones import EGNN, PaiNN, egnn
from blips.backbones.base import Backbone, gather_rows, pair_rows
from blips.backbones.derivatives import energy_and_derivatives
from blips.bayes.pairs import PairRows
from blips.config import load_config
from blips.data.batch import Batch
from blips.data.dataset import ParticleData, StructureData
from blips.train.objective import Objective
from blips.train.run import environment


def nh3_batch() -> Batch:
    """64 rattled ammonia molecules."""
    return StructureData([_labelled(molecule("NH3"), seed) for seed in range(64)], 5.0).batch(
        range(64)
    )


def quartz(seed: int = 0) -> Atoms:
    """A 36-atom cell of alpha quartz (2 x 2 x 1), rattled."""
    cell = crystal(
        ["Si", "O"],
        basis=[(0.4697, 0, 1 / 3), (0.4135, 0.2669, 0.7858)],
        spacegroup=152,
        cellpar=[4.916, 4.916, 5.4054, 90, 90, 120],
    )
    return _labelled(cell * (2, 2, 1), seed)


def silica_batch() -> Batch:
    """8 cells of 36 atoms."""
    return StructureData([quartz(seed) for seed in range(8)], 5.0).batch(range(8))


def nbody_batch() -> Batch:
    """100 simulations of 5 charged particles."""
    rng = np.random.default_rng(0)
    x, v = rng.normal(size=(2, 100, 5, 3))
    q = rng.choice([-1.0, 1.0], size=(100, 5))
    return ParticleData(x, v, q, x + v).batch(range(100))


def _labelled(atoms: Atoms, seed: int) -> Atoms:
    atoms = atoms.copy()
    rng = np.random.default_rng(seed)
    atoms.positions += rng.normal(scale=0.05, size=atoms.positions.shape)
    forces = rng.normal(size=atoms.positions.shape)
    atoms.calc = SinglePointCalculator(atoms, energy=rng.normal(), forces=forces)
    return atoms


def interleaved(candidates: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Times of each candidate, measured in turn so that they share the machine's moods."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    for _ in range(repeats):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> dict[str, float]:
    """Median over repeats of the ratio within a repeat, and the ratio of the shortest times."""
    pairs = zip(seconds[name], seconds[base], strict=True)
    return {
        "median": statistics.median(a / b for a, b in pairs),
        "shortest": min(seconds[name]) / min(seconds[base]),
    }


def training(backbone: Backbone, batch: Batch, loss: str, repeats: int) -> dict[str, Any]:
    """Training-step ratios of each estimator that the model allows."""
    config = load_config({"training": {"loss": loss}}).training
    estimators = ("flipout",) if backbone.conservative else ("local", "flipout")
    models: dict[str, Any] = {"base": backbone}
    for name in estimators:
        variant = "neighbourhood" if backbone.conservative else "paper-nbody"
        models[name] = blips.bayesianize(
            copy.deepcopy(backbone), estimator=name, encoder={"variant": variant}
        )
    objectives = {name: Objective(model, config, 100) for name, model in models.items()}

    def step(name: str) -> None:
        objectives[name].zero_grad()
        objectives[name](batch, ("benchmark", 0), 1.0).total.backward()

    steps = {name: (lambda name=name: step(name)) for name in objectives}
    seconds = interleaved(steps, repeats)
    return {name: ratio(seconds, name, "base") for name in estimators}


class NodewiseLinear(nn.Linear):
    """A plain map of pairs that is worked out on their nodes."""

    def forward(self, input: Any) -> Tensor:
        """[E, out] of `PairRows`."""
        h: PairRows = input
        width = h.node.shape[1]
        first, second, own = self.weight.split([width, width, h.pair.shape[1]], dim=1)
        ends = zip((first, second), h.edges, strict=True)
        of_ends = [gather_rows(F.linear(h.node, weight), end) for weight, end in ends]
        return F.linear(h.pair, own, self.bias) + of_ends[0] + of_ends[1]


def node_wise(backbone: EGNN, repeats: int) -> dict[str, Any]:
    """EGNN's training step with node-wise maps in both models, and in none."""
    torch.manual_seed(0)
    config = load_config({"training": {"loss": "mse"}}).training
    plain, batch = copy.deepcopy(backbone), nbody_batch()
    for layer in plain.layers:
        cast(Any, layer).message[0].__class__ = NodewiseLinear
    encoder = {"variant": "paper-nbody"}
    bayesian = blips.bayesianize(copy.deepcopy(backbone), estimator="local", encoder=encoder)
    models = {"plain": backbone, "node-wise plain": plain, "local": bayesian, "pairs": bayesian}
    rows = {"node-wise plain": PairRows, "pairs": lambda *given: PairRows(*given).rows()}
    objectives = {name: Objective(model, config, 100) for name, model in models.items()}

    def step(name: str) -> None:
        with patch.object(egnn, "pair_rows", rows.get(name, pair_rows)):
            objectives[name].zero_grad()
            objectives[name](batch, ("benchmark", 0), 1.0).total.backward()

    seconds = interleaved({name: (lambda name=name: step(name)) for name in models}, repeats)
    return {
        "local, no node-wise maps": ratio(seconds, "pairs", "plain"),
        "local over node-wise plain": ratio(seconds, "local", "node-wise plain"),
        "node-wise plain": ratio(seconds, "node-wise plain", "plain"),
    }


def prediction(atoms: Atoms, repeats: int, samples: int = 32) -> dict[str, Any]:
    """MAP over the plain backbone, and `samples` samples over MAP."""
    torch.manual_seed(0)
    backbone = PaiNN()
    potential = blips.bayesianize(copy.deepcopy(backbone))
    graph = backbone.graph(atoms)
    seconds = interleaved(
        {
            "base": lambda: energy_and_derivatives(lambda g: backbone(g)[keys.ENERGIES], graph),
            "map": lambda: potential(graph),
            "map_call": lambda: potential.predict(graph, method="map"),
            "mc": lambda: potential.predict(graph, samples=samples),
        },
        repeats,
    )
    return {
        "map": ratio(seconds, "map", "base"),
        f"mc_{samples}": ratio(seconds, "mc", "map_call"),
    }


def measure(repeats: int) -> dict[str, Any]:
    """All ratios, by case."""
    torch.manual_seed(0)
    plain, painn, threads = EGNN(), PaiNN(), torch.get_num_threads()
    torch.set_num_threads(1)
    results = {
        "training EGNN, 100 n-body": {
            **training(plain, nbody_batch(), "mse", 4 * repeats),
            **node_wise(plain, 4 * repeats),
        },
        "training PaiNN, 64 NH3": training(painn, nh3_batch(), "mae", repeats),
        "training PaiNN, 8 x 36 silica": training(painn, silica_batch(), "mae", repeats),
    }
    torch.set_num_threads(threads)
    results["prediction PaiNN, 1 NH3"] = prediction(molecule("NH3"), 4 * repeats)
    results["prediction PaiNN, 36-atom silica"] = prediction(quartz(), repeats)
    return results


def table(results: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| case | what | ratio (median) | ratio (shortest) |", "|---|---|---|---|"]
    for case, rows in results.items():
        for name, row in rows.items():
            lines.append(f"| {case} | {name} | {row['median']:.2f} | {row['shortest']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = measure(options.repeats)
    print(table(results))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        content = {"results": results, "environment": environment()}
        (options.output / "potential.json").write_text(json.dumps(content, indent=1) + "\n")
        (options.output / "potential.md").write_text(table(results))


if __name__ == "__main__":
    main()
