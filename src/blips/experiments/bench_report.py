"""All benchmarks in one run: JSON, Markdown and a plot, with machine, versions and commit."""

import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from blips.experiments.bench import SIZES, cost, cost_table
from blips.experiments.bench_flops import flops, flops_table
from blips.experiments.bench_peers import peers, peers_table
from blips.train.run import environment

PARTS = ("cost", "flops", "peers")


def bench(
    folder: Path,
    *,
    parts: Sequence[str] = PARTS,
    sizes: Sequence[int] = SIZES,
    samples: Sequence[int] = (8, 32),
    repeats: int = 7,
    models: Sequence[str] = (),
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure `parts` and write bench.json, bench.md and bench.png; what else is there is kept.

    Args:
        folder: for the files.
        parts: out of `PARTS`.
        sizes: numbers of atoms for the cost.
        samples: numbers of samples for the cost.
        repeats: of every time.
        models: whose operations are counted; all if empty.
        report: told of what is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bench.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    measure: dict[str, Callable[[], Any]] = {
        "cost": lambda: cost(sizes, samples, repeats),
        "flops": lambda: flops(models, report=report),
        "peers": lambda: peers(repeats=2 * repeats),
    }
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for part in parts:
            results = {**found.get(part, {}).get("results", {}), **measure[part]()}
            found[part] = {"where": where(), "repeats": repeats, "results": results}
            report(f"{part} measured")
            path.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        torch.set_num_threads(before)
    (folder / "bench.md").write_text(markdown(found))
    if "cost" in found:
        plot(found["cost"]["results"], folder / "bench.png")
    return found


def where() -> dict[str, Any]:
    """Machine, versions, commit, and how busy the machine is."""
    try:
        words = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    processor = platform.processor() or platform.machine()
    return {"commit": commit, "processor": processor, "load": load, **environment()}


def markdown(found: dict[str, Any]) -> str:
    """All tables."""
    lines = ["# What error bars cost", ""]
    titles: dict[str, tuple[str, Callable[[Any], str]]] = {
        "cost": (
            "Time over energy and forces of the base (peak memory), PaiNN, one thread",
            cost_table,
        ),
        "flops": ("Parameters and operations, 36 atoms of quartz", flops_table),
        "peers": ("Stochastic layers, forward + backward over plain ones, 2000 rows", peers_table),
    }
    for part, (title, table) in titles.items():
        if part in found:
            place = found[part]["where"]
            lines += [f"## {title}", "", table(found[part]["results"])]
            lines += [f"Commit {place['commit']}, load of the machine {place['load']}.", ""]
    return "\n".join(lines)


def plot(found: dict[str, Any], path: Path) -> None:
    """Ratios against the number of atoms."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    names: dict[str, None] = {}
    for rows in found.values():
        names.update(dict.fromkeys(rows))
    for name in names:
        points = [
            (int(atoms), rows[name]["ratio"]) for atoms, rows in found.items() if name in rows
        ]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="atoms", ylabel="time / base energy + forces")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
