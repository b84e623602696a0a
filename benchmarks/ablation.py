"""What each part of the speed layer buys: time without the part over time with it.

Parts are switched off one at a time, in one process, in turn with the whole, on one thread, by
processor time. ``memory`` (glibc's mallopt) cannot be taken back, so a second process does without
it. Run ``python benchmarks/ablation.py --output results/benchmarks/ablation``.
"""

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from ase import Atoms
from ase.build import molecule
from torch import Tensor

import blips
from blips import onepass, potential, sampling
from blips.backbones import EGNN, PaiNN, egnn, load, messages, painn
from blips.backbones.base import Backbone
from blips.bayes import algebra, estimators, functions, kernels, pairs, pieces, weights
from blips.config import load_config
from blips.data.batch import Batch
from blips.data.dataset import StructureData
from blips.train.objective import Objective
from blips.train.run import environment
from potential import _labelled, nbody_batch, quartz

Call = Callable[[], Any]
LEAST_SECONDS = 0.1


def structures(build: Callable[[int], Atoms], count: int) -> list[Atoms]:
    """Rattled and labelled."""
    return [build(seed) for seed in range(count)]


def nh3(seed: int) -> Atoms:
    """A rattled ammonia molecule."""
    return _labelled(molecule("NH3"), seed)


def step(backbone: Backbone, batch: Batch, *, noise: bool, **options: Any) -> Call:
    """Forward and backward of a training step."""
    settings = {"training": {"loss": options.pop("loss", "mae"), "noise": noise}}
    model = blips.bayesianize(backbone, **options)
    objective = Objective(model, load_config(settings).training, 100)

    def run() -> None:
        objective.zero_grad()
        objective(batch, ("benchmark", 0), 1.0).total.backward()

    return run


def batch_for(backbone: Any, atoms: list[Atoms]) -> Batch:
    """All structures as one batch."""
    dtype = next(backbone.parameters()).dtype
    return StructureData(atoms, backbone.graph_of, dtype=dtype).batch(range(len(atoms)))


def painn_step(build: Callable[[int], Atoms], count: int, noise: bool) -> Call:
    """A training step of PaiNN."""
    backbone = PaiNN()
    return step(backbone, batch_for(backbone, structures(build, count)), noise=noise)


def released_step(name: str) -> Call:
    """A training step of a released model on a 36-atom cell."""
    backbone: Any = load(name)
    return step(backbone, batch_for(backbone, [quartz()]), noise=True, loss="huber")


def egnn_step(estimator: str, noise: bool = True) -> Call:
    """A training step of EGNN."""
    options = {"estimator": estimator, "encoder": {"variant": "paper-nbody"}, "loss": "mse"}
    return step(EGNN(), nbody_batch(), noise=noise, **options)


def predict(build: Callable[[int], Atoms], conditioned: bool = False, **options: Any) -> Call:
    """A prediction of one structure by PaiNN."""
    model = blips.bayesianize(PaiNN())
    if conditioned:
        model.condition(structures(build, 4), valid=structures(build, 6)[4:])
    graph = model.backbone.graph(build(9))
    return lambda: model.predict(graph, **options)


def calculator_step() -> Call:
    """Energy and forces by the calculator, neighbour list included."""
    atoms = quartz(9)
    atoms.calc = blips.Calculator(blips.bayesianize(PaiNN()), method="map")

    def run() -> None:
        atoms.positions[0, 0] += 1e-4
        atoms.get_forces()

    return run


def released_onepass(name: str) -> Call:
    """One pass of a released model."""
    model = blips.bayesianize(load(name))
    graph = model.backbone.graph(quartz())
    return lambda: model.predict(graph, method="onepass")


WORKLOADS: dict[str, Callable[[], Call]] = {
    "plain step, PaiNN, 8 NH3": lambda: painn_step(nh3, 8, noise=False),
    "plain step, PaiNN, 4 x 36 silica": lambda: painn_step(quartz, 4, noise=False),
    "noise step, PaiNN, 8 NH3": lambda: painn_step(nh3, 8, noise=True),
    "noise step, PaiNN, 4 x 36 silica": lambda: painn_step(quartz, 4, noise=True),
    "noise step, CHGNet": lambda: released_step("chgnet"),
    "noise step, MatterSim": lambda: released_step("mattersim-1m"),
    "noise step, EGNN local": lambda: egnn_step("local"),
    "noise step, EGNN flipout": lambda: egnn_step("flipout"),
    "plain step, EGNN": lambda: egnn_step("local", noise=False),
    "predict mc 16, PaiNN, NH3": lambda: predict(nh3, method="mc", samples=16),
    "predict mc 16, PaiNN, silica": lambda: predict(quartz, method="mc", samples=16),
    "predict conditioned 16, NH3": lambda: predict(nh3, True, samples=16),
    "predict conditioned 16, silica": lambda: predict(quartz, True, samples=16),
    "predict map, PaiNN, NH3": lambda: predict(nh3, method="map"),
    "predict map, PaiNN, silica": lambda: predict(quartz, method="map"),
    "calculator map, PaiNN, silica": calculator_step,
    "predict onepass, CHGNet": lambda: released_onepass("chgnet"),
}


# ------------------------------------------------------------------------------------ parts


def plain_flipout(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coef: Tensor,
    deviation: Tensor,
    eps: Tensor | None,
    bits_in: Tensor,
    bits_out: Tensor,
) -> Tensor:
    """Autograd's own derivatives."""
    return functions._flipout_again(h, weight, bias, coef, deviation, eps, bits_in, bits_out)


def plain_local(h: Tensor, weight: Tensor, bias: Any, coef: Tensor, eps: Tensor) -> Tensor:
    """Autograd's own derivatives."""
    std = (coef[:, None] * F.linear(h * h, weight * weight) + 1e-12).sqrt()
    return F.linear(h, weight, bias) + eps.clone() * std


def off(target: Any, name: str, value: Any) -> Any:
    """A switch."""
    return patch.object(target, name, value)


def nothing(*_: Any) -> None:
    """Stands for a library that was not built."""


PARTS: dict[str, list[Any]] = {
    "kernels (C)": [
        off(kernels, "library_for", nothing),
        off(kernels, "library", nothing),
        off(pairs, "library_for", nothing),
    ],
    "functions": [off(estimators, "flipout", plain_flipout), off(estimators, "local", plain_local)],
    "pieces": [off(pieces, "PIECE", 2**40)],
    "pairs": [off(egnn, "pair_rows", lambda *given: pairs.PairRows(*given).rows())],
    "shared": [off(painn, "of_lengths", lambda function, x: function(x))],
    "slopes": [
        off(potential.BayesianPotential, "_shared_coefficients", lambda s, g, k: s.coefficients)
    ],
    "gathered": [off(onepass, "watched_where_it_pays", lambda *_: nullcontext())],
    "algebra": [off(algebra, "FEW_ROWS", 0)],
    "messages (C)": [off(messages, "library", nothing)],
    "shared draws": [off(weights, "SHARING", 1), off(sampling, "SHARING", 1)],
    "noise store": [off(weights.NoiseStore, "get", lambda s, *key: weights.WeightNoise(*key))],
}
PARTS["all of these"] = [switch for switches in PARTS.values() for switch in switches]


@contextmanager
def without(part: str) -> Iterator[None]:
    """Switch a part off."""
    with ExitStack() as stack:
        for switch in PARTS.get(part, []):
            stack.enter_context(copy.copy(switch))
        yield


# ---------------------------------------------------------------------------------- measure


def seconds(call: Call, part: str) -> float:
    """Processor time of one call, the mean of as many as take a tenth of a second."""
    with without(part):
        call()
        count, start = 0, time.process_time()
        while count == 0 or time.process_time() - start < LEAST_SECONDS:
            call()
            count += 1
        return (time.process_time() - start) / count


def work(workload: str, keeps_memory: bool) -> None:
    """Answer every part that is read with the time of a call without it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not keeps_memory:
        potential.keep_freed_memory = lambda: False
    call = WORKLOADS[workload]()
    for part in sys.stdin:
        print(seconds(call, part.strip()), flush=True)


class Worker:
    """A process of its own for one workload."""

    def __init__(self, workload: str, *options: str) -> None:
        command = [sys.executable, __file__, "--work", workload, *options]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)

    def seconds(self, part: str) -> float:
        """Of one call without the part."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(part + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def measure(workload: str, repeats: int) -> dict[str, float]:
    """Ratio for each part: without over with, median over repeats; and the time of the whole."""
    workers = {True: Worker(workload), False: Worker(workload, "--forget")}
    candidates = {part: (workers[True], part) for part in (*PARTS, "")}
    candidates["memory"] = (workers[False], "")
    found: dict[str, list[float]] = {part: [] for part in candidates}
    for repeat in range(repeats + 1):
        for part, (worker, name) in candidates.items():
            taken = worker.seconds(name)
            if repeat >= 1:
                found[part].append(taken)
    for worker in workers.values():
        worker.process.communicate()
    ratios = {
        part: statistics.median(a / b for a, b in zip(times, found[""], strict=True))
        for part, times in found.items()
        if part
    }
    return {"seconds": statistics.median(found[""]), **ratios}


def table(results: dict[str, dict[str, float]]) -> str:
    """Markdown, one row for each workload."""
    columns = list(next(iter(results.values())))
    lines = ["| workload | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for workload, row in results.items():
        cells = [f"{row[c]:.3f}" if c == "seconds" else f"{row[c]:.2f}" for c in columns]
        lines.append("| " + " | ".join([workload, *cells]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="")
    parser.add_argument("--work")
    parser.add_argument("--forget", action="store_true")
    options = parser.parse_args()
    if options.work:
        work(options.work, not options.forget)
        return
    results: dict[str, dict[str, float]] = {}
    for workload in [name for name in WORKLOADS if options.only in name]:
        results[workload] = measure(workload, options.repeats)
        print(table({workload: results[workload]}), flush=True)
        if options.output:
            commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True)
            content = {"results": results, "commit": commit.strip(), "environment": environment()}
            options.output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
            options.output.with_suffix(".md").write_text(table(results))


if __name__ == "__main__":
    main()
