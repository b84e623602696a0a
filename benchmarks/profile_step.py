"""Where the time of a training step goes, plain and with a posterior, by torch's profiler.

Times of operations are added up in groups: matrix products, what stochastic maps do besides them
(signs, noise, their derivatives), activations, gathering and scattering of rows, and the rest.
Everything is in units of the plain step. A posterior costs one more matrix product for each of a
Bayesian map; see the row of products. Estimators are those that `bayesianize` chooses: local for
EGNN, which works out the first map of a message on nodes in place of pairs, and flipout for PaiNN.

Run ``python benchmarks/profile_step.py --output results/benchmarks/profile``. The profiler measures
wall time; of each operation the least of all repeats counts.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import blips
from blips.backbones import EGNN, PaiNN
from blips.config import load_config
from blips.train.objective import Objective
from blips.train.run import environment
from potential import nbody_batch, nh3_batch

GROUPS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "stochastic maps": ("_Flipout", "_Local", "aten::normal_", "aten::random_", "aten::sqrt"),
    "activations": ("aten::silu", "aten::sigmoid", "aten::tanh"),
    "gather, scatter": ("aten::index", "aten::scatter", "aten::gather", "aten::cat"),
}


def group_of(operation: str) -> str:
    """Name of the group that an operation belongs to."""
    name = operation.removeprefix("autograd::engine::evaluate_function: ")
    for group, beginnings in GROUPS.items():
        if name.startswith(beginnings):
            return group
    return "rest"


def stepper(model: Any, config: Any, batch: Any) -> Callable[[], None]:
    """One training step's forward and backward."""
    objective = Objective(model, config, 100)

    def step() -> None:
        objective.zero_grad()
        objective(batch, ("benchmark", 0), 1.0).total.backward()

    return step


def operations(step: Callable[[], None]) -> list[tuple[str, float]]:
    """Names and own microseconds of the operations of a step, in order."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    events = sorted(found.events() or [], key=lambda event: event.time_range.start)
    return [(event.name, float(event.self_cpu_time_total)) for event in events]


def shares(rounds: list[list[tuple[str, float]]]) -> dict[str, float]:
    """Microseconds by group, out of the least time of each operation.

    Steps are the same operations in the same order, so that the least of many is the time without
    interruptions, even on a machine that does other things.
    """
    total: dict[str, float] = dict.fromkeys([*GROUPS, "rest"], 0.0)
    length = Counter(map(len, rounds)).most_common(1)[0][0]
    for same in zip(*(one for one in rounds if len(one) == length), strict=True):
        total[group_of(same[0][0])] += min(time for _, time in same)
    return total


def measure(repeats: int) -> dict[str, Any]:
    """Least times of the groups, plain and with a posterior in turn, over the plain step's."""
    cases = {
        "EGNN, 100 n-body": (EGNN, nbody_batch(), "mse", "paper-nbody"),
        "PaiNN, 64 NH3": (PaiNN, nh3_batch(), "mae", "neighbourhood"),
    }
    found: dict[str, Any] = {}
    for name, (make, batch, loss, variant) in cases.items():
        config = load_config({"training": {"loss": loss}}).training
        torch.manual_seed(0)
        bayesian = blips.bayesianize(make(), encoder={"variant": variant})
        steps = {
            "plain": stepper(make(), config, batch),
            "posterior": stepper(bayesian, config, batch),
        }
        rounds = [{way: operations(step) for way, step in steps.items()} for _ in range(repeats)]
        least = {way: shares([one[way] for one in rounds]) for way in steps}
        whole = sum(least["plain"].values())
        found[name] = {
            way: {group: round(time / whole, 3) for group, time in row.items()}
            for way, row in least.items()
        }
    return found


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    groups = [*GROUPS, "rest"]
    lines = ["| step | | " + " | ".join(groups) + " | all |", "|" + "---|" * (len(groups) + 3)]
    for name, rows in found.items():
        for way, row in rows.items():
            cells = [f"{row.get(group, 0.0):.2f}" for group in groups]
            lines.append(f"| {name} | {way} | {' | '.join(cells)} | {sum(row.values()):.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(options.repeats)
    print(table(results))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        content = {"results": results, "environment": environment()}
        options.output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(table(results))


if __name__ == "__main__":
    main()
