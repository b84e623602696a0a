"""How results are written: JSON, Markdown and a plot, with machine, versions and commit."""

import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cost import REPEATS, SAMPLES, cost, cost_table
from benchmarks.flops import flops, flops_table
from benchmarks.memory import memory, memory_table
from benchmarks.peers import peers, peers_table
from benchmarks.structures import SIZES
from blips.train.run import environment

PARTS = ("cost", "memory", "flops", "peers")
LINES = ("-", "--", ":", "-.")
MARKERS = "os^Dvpx*"


def bench(
    folder: Path,
    *,
    parts: Sequence[str] = PARTS,
    sizes: Sequence[int] = SIZES,
    samples: Sequence[int] = SAMPLES,
    repeats: int = REPEATS,
    models: Sequence[str] = (),
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure `parts` and write bench.json, bench.md and bench.png; what else is there is kept.

    Args:
        folder: for the files.
        parts: out of `PARTS`.
        sizes: numbers of atoms for cost and memory.
        samples: numbers of samples for the cost.
        repeats: of every time, at most.
        models: whose operations are counted; all if empty.
        report: told of what is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bench.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    measure: dict[str, Callable[[], Any]] = {
        "cost": lambda: cost(sizes, samples, repeats),
        "memory": lambda: memory(sizes, repeats=min(3, repeats)),
        "flops": lambda: flops(models, report=report),
        "peers": lambda: peers(repeats=repeats),
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
    """Describe machine, versions, commit, and how busy the machine is."""
    try:
        words = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    processor = platform.processor() or platform.machine()
    return {"commit": commit, "processor": processor, "load": load, **environment()}


def markdown(found: dict[str, Any]) -> str:
    """Format all tables."""
    lines = ["# What error bars cost", ""]
    titles: dict[str, tuple[str, Callable[[Any], str]]] = {
        "cost": (
            "Time over energy and forces of the base ± half a 95 % interval (peak memory), PaiNN, "
            "one thread",
            cost_table,
        ),
        "memory": ("Samples under a memory bound, PaiNN, one thread", memory_table),
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
    """Plot ratios against the number of atoms, and against that of samples."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names: dict[str, None] = {}
    for rows in found.values():
        names.update(dict.fromkeys(rows))
    for number, name in enumerate(names):
        points = {int(n): rows[name]["ratio"] for n, rows in found.items() if name in rows}
        left.plot(*_sorted(points), label=name, **style(number))
    for number, (atoms, rows) in enumerate(found.items()):
        points = {
            int(name.rsplit(" ", 1)[1]): row["ratio"]
            for name, row in rows.items()
            if name.startswith("mc batched")
        }
        if points:
            right.plot(*_sorted(points), label=f"{atoms} atoms", **style(number))
    label = "processor time / base energy + forces"
    left.set(xscale="log", yscale="log", xlabel="atoms", ylabel=label)
    right.set(xscale="log", xlabel="batched samples")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, ncols=5, loc="outside lower center")
    right.legend(fontsize=7)
    figure.savefig(path, dpi=150)


def style(number: int) -> dict[str, str]:
    """Return colour, line and marker; no two of the first forty are the same."""
    return {
        "color": f"C{number % 10}",
        "linestyle": LINES[number // 10 % len(LINES)],
        "marker": MARKERS[number % len(MARKERS)],
    }


def _sorted(points: dict[int, float]) -> tuple[list[int], list[float]]:
    ordered = sorted(points.items())
    return [x for x, _ in ordered], [y for _, y in ordered]
