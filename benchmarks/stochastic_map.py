"""Cost of the stochastic linear maps relative to ``nn.Linear``.

Every figure is a ratio of two times that were measured in turn within one run (processor time with
one thread, wall time with several):

* ``training``: forward and backward with gradients of input, weight, bias and coefficient, as the
  ratio of the median times (``training_min``: of the shortest times);
* ``forces``: the gradient of the input with ``create_graph``, then backward through it, as in
  training a conservative potential on forces;
* ``saved`` and ``peak``: memory beyond ``nn.Linear`` that waits for the backward pass, and at the
  worst moment of a training step, in units of one activation (the larger of input and output).

On a busy machine trust the ratios of the shortest times (``_min``). Freed memory is kept, as every
potential asks for (``blips.memory``).

Run ``python benchmarks/stochastic_map.py --output results`` to write ``results.json`` and
``results.md``.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blips.bayes.estimators import flipout_linear, local_linear
from blips.memory import keep_freed_memory

SHAPES = [(14000, 256, 1024), (14000, 1024, 256), (2000, 64, 64), (36000, 128, 128)]
TARGETS = {SHAPES[0]: 2.5, SHAPES[1]: 2.5, SHAPES[2]: 3.0, SHAPES[3]: 3.0}

Map = Callable[["Problem"], Tensor]


class Problem:
    """Inputs of one map in the middle of a network: everything requires a gradient."""

    def __init__(self, rows: int, inputs: int, outputs: int) -> None:
        self.h = torch.randn(rows, inputs, requires_grad=True)
        self.weight = (torch.randn(outputs, inputs) / inputs**0.5).requires_grad_()
        self.bias = torch.zeros(outputs, requires_grad=True)
        self.coef = torch.rand(rows).add_(0.1).requires_grad_()
        self.grad_z = torch.randn(rows, outputs)
        self.grad_h = torch.randn(rows, inputs)
        self.generators = [torch.Generator().manual_seed(0)]

    def forget_gradients(self) -> None:
        """Drop the gradients, so that no pass pays for accumulation."""
        for tensor in (self.h, self.weight, self.bias, self.coef):
            tensor.grad = None


def linear(p: Problem) -> Tensor:
    """The deterministic map."""
    return F.linear(p.h, p.weight, p.bias)


def local(p: Problem) -> Tensor:
    """The map with sampled outputs."""
    return local_linear(p.h, p.weight, p.bias, p.coef, p.generators)


def flipout(p: Problem) -> Tensor:
    """The map with sampled weights and random signs."""
    return flipout_linear(p.h, p.weight, p.bias, p.coef, p.generators)


MAPS: dict[str, Map] = {"linear": linear, "local": local, "flipout": flipout}


def training_step(apply: Map, p: Problem) -> None:
    """Forward and backward."""
    p.forget_gradients()
    apply(p).backward(p.grad_z)


def forces_step(apply: Map, p: Problem) -> None:
    """Forward, differentiable gradient of the input, backward through that gradient.

    The gradient that arrives from the rest of the network needs a gradient itself, as it does in a
    real potential.
    """
    p.forget_gradients()
    grad_z = p.grad_z.clone().requires_grad_()
    (force,) = torch.autograd.grad(apply(p), p.h, grad_z, create_graph=True)
    force.backward(p.grad_h)


def times_in_turn(
    step: Callable[[Map, Problem], None], p: Problem, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each map, measured in turn so that all meet the same disturbances."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in MAPS}
    for _ in range(repeats + 1):
        for name, apply in MAPS.items():
            start = clock()
            step(apply, p)
            times[name].append(clock() - start)
    return {name: values[1:] for name, values in times.items()}  # the first round warms up


def ratio(
    times: dict[str, list[float]], name: str, summary: Callable[[list[float]], float]
) -> float:
    """Summary (median, min) of a map's times over that of ``nn.Linear``'s."""
    return round(summary(times[name]) / summary(times["linear"]), 2)


def saved_bytes(apply: Map, p: Problem) -> int:
    """Bytes of distinct storages that autograd keeps for the backward pass."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = apply(p)
    del output
    return sum(storages.values())


def peak_bytes(apply: Map, p: Problem) -> int:
    """Most bytes that one training step has allocated at any moment."""
    p.forget_gradients()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as recording:
        training_step(apply, p)
    profiler: Any = recording.profiler
    events = profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate((change for _, change in changes), initial=0))


def measure(shape: tuple[int, int, int], threads: int, repeats: int) -> list[dict[str, object]]:
    """One row of the table per estimator."""
    torch.set_num_threads(threads)
    rows, inputs, outputs = shape
    p = Problem(*shape)
    repeats = repeats if rows * inputs * outputs > 10**9 else repeats * 5
    training = times_in_turn(training_step, p, repeats)
    forces = times_in_turn(forces_step, p, repeats)
    activation = 4 * rows * max(inputs, outputs)
    saved = {name: saved_bytes(apply, p) for name, apply in MAPS.items()}
    peak = {name: peak_bytes(apply, p) for name, apply in MAPS.items()}
    table: list[dict[str, object]] = []
    for name in ("local", "flipout"):
        table.append(
            {
                "rows": rows,
                "in": inputs,
                "out": outputs,
                "threads": threads,
                "estimator": name,
                "linear_ms": round(1e3 * statistics.median(training["linear"]), 2),
                "training": ratio(training, name, statistics.median),
                "training_min": ratio(training, name, min),
                "target": TARGETS[shape],
                "forces": ratio(forces, name, statistics.median),
                "forces_min": ratio(forces, name, min),
                "saved": round((saved[name] - saved["linear"]) / activation, 2),
                "peak": round((peak[name] - peak["linear"]) / activation, 2),
            }
        )
    return table


def markdown(table: list[dict[str, object]]) -> str:
    """The table as GitHub-flavoured Markdown."""
    keys = list(table[0])
    lines = [keys, ["---"] * len(keys), *([str(row[key]) for key in keys] for row in table)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> None:
    """Measure every shape with one thread and with the default number, and print the table."""
    parser = argparse.ArgumentParser(description="Cost of the stochastic linear maps.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", help="default: 1 and torch's default")
    parser.add_argument("--output", type=Path, help="path without suffix for the JSON and Markdown")
    arguments = parser.parse_args()
    keep_freed_memory()
    default = torch.get_num_threads()
    table = [
        row
        for threads in arguments.threads or sorted({1, default})
        for shape in SHAPES
        for row in measure(shape, threads, arguments.repeats)
    ]
    text = markdown(table)
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        report = {"torch": torch.__version__, "threads": default, "rows": table}
        arguments.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
