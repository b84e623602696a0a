"""What does a training step with BLIP's noise cost, relative to one of the plain model?

Forward and backward of a step (energies and forces where the model is conservative), by estimator,
on one thread; ratios as in `benchmarks.measure`.

    python -m benchmarks.training --output results/benchmarks/training
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import studies.encoders  # noqa: F401 (knows the paper's inference networks)
from benchmarks.measure import Call, measure
from benchmarks.structures import labelled, structure
from blips.backbones import PaiNN
from blips.backbones.base import Backbone
from blips.config import load_config
from blips.conversion import bayesianize
from blips.data.dataset import Batch, StructureData
from blips.train.objective import Model, Objective
from blips.train.run import environment
from studies.nbody import EGNN, ParticleData


def atom_batch(atoms: int, count: int) -> Batch:
    """Make `count` displaced structures with labels."""
    structures = [labelled(structure(atoms, seed), seed) for seed in range(count)]
    return StructureData(structures, 5.0).batch(range(count))


def particle_batch() -> Batch:
    """Make 100 simulations of 5 charged particles."""
    rng = np.random.default_rng(0)
    x, v = rng.normal(size=(2, 100, 5, 3))
    q = rng.choice([-1.0, 1.0], size=(100, 5))
    return ParticleData(x, v, q, x + v).batch(range(100))


def step(model: Model, batch: Batch, loss: str) -> Call:
    """Run forward and backward of a training step."""
    config = load_config({"training": {"loss": loss, "noise": True}}).training
    objective = Objective(model, config, num_data=100)

    def run() -> None:
        objective.zero_grad()
        objective(batch, ("benchmark", 0), 1.0).total.backward()

    return run


def training(backbone: Backbone, batch: Batch, loss: str, repeats: int) -> dict[str, Any]:
    """Measure the ratios of each estimator that the model allows."""
    conservative = backbone.conservative
    estimators = ("flipout",) if conservative else ("local", "flipout")
    encoder = {"variant": "neighbourhood" if conservative else "paper-nbody"}
    calls = {"base": step(backbone, batch, loss)}
    for name in estimators:
        model = bayesianize(copy.deepcopy(backbone), estimator=name, encoder=encoder)
        calls[name] = step(model, batch, loss)
    rows = measure(calls, repeats).rows()
    return {name: rows[name] for name in estimators}


def table(results: dict[str, Any]) -> str:
    """Format the results as Markdown."""
    lines = ["| case | estimator | step / plain (median) | 95 % interval |", "|---|---|---|---|"]
    for case, rows in results.items():
        for name, row in rows.items():
            interval = " to ".join(f"{end:.2f}" for end in row["ratio_interval"] or ()) or "-"
            lines.append(f"| {case} | {name} | {row['ratio']:.2f} | {interval} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write .json and .md where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = {
        "EGNN, 100 n-body": training(EGNN(), particle_batch(), "mse", options.repeats),
        "PaiNN, 64 NH3": training(PaiNN(), atom_batch(4, 64), "mae", options.repeats),
        "PaiNN, 8 x 36 quartz": training(PaiNN(), atom_batch(36, 8), "mae", options.repeats),
    }
    print(table(results))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        content = {"results": results, "environment": environment()}
        options.output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(table(results))


if __name__ == "__main__":
    main()
