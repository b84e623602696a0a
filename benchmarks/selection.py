"""How long does it take to choose a batch from a large pool in closed form?

    python -m benchmarks.selection --structures 10000 --output results/benchmarks/selection

A conditioned PaiNN of the default size chooses ten of displaced NH3 geometries by every rule, with
two workers. Seconds are of the processor, of all processes together, over the number of workers:
what it takes on as many quiet cores. Ratios are to a prediction of the whole pool without error
bars, in one process, whose seconds are divided likewise.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

import blips
from benchmarks.pool import write_pool
from blips.active.candidates import Pool
from blips.active.config import Rule, load_campaign
from blips.active.executor import make_executor
from blips.active.select import choose, screen_candidates
from blips.active.store import CampaignStore
from blips.backbones import PaiNN
from blips.data.ammonia import load_ammonia
from blips.data.structures import read_structures

WORKERS = 2
RULES = [rule for rule in get_args(Rule) if rule != "auto"]


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Measure processor seconds on `WORKERS` cores, elapsed seconds, and the machine's load."""
    before, begun = processor_seconds(), time.perf_counter()
    work()
    busy, clock = (processor_seconds() - before) / WORKERS, time.perf_counter() - begun
    return {"seconds": busy, "clock": clock, "load": os.getloadavg()[0]}


def select(folder: Path, pool: Path, model: Path, rule: str) -> None:
    """Screen the pool and choose a batch."""
    config = load_campaign(
        {
            "initial": {"structures": str(pool)},
            "explore": {"kind": "pool", "pool": str(pool)},
            "select": {"rule": rule, "batch": 10, "chunk": 256},
            "executor": {"kind": "local", "workers": WORKERS},
        }
    )
    candidates = Pool(pool)
    with CampaignStore(folder / rule) as store:
        with make_executor(config.executor) as executor:
            found = screen_candidates(candidates, model, config, store, executor, 1, None)
        picks = choose(candidates, found, model, config.select.batch)
    if len(picks) != config.select.batch or found.seen != len(candidates):
        raise SystemExit(f"{len(picks)} of {found.seen} structures were chosen")


def main() -> None:
    """Choose by every rule."""
    parser = argparse.ArgumentParser(description="Time of selection in closed form.")
    parser.add_argument("--structures", type=int, default=10_000)
    parser.add_argument("--rules", nargs="+", default=RULES, choices=RULES)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(cutoff=5.0))
    potential.condition(load_ammonia("train"), valid=load_ammonia("valid"))
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = blips.save(potential, folder / "model.safetensors")
        write_pool(folder / "pool.extxyz", options.structures)
        frames = read_structures(folder / "pool.extxyz")
        rows["map"] = timed(lambda: potential.predict(frames, method="map"))
        for rule in options.rules:
            rows[rule] = timed(
                lambda rule=rule: select(folder, folder / "pool.extxyz", model, rule)
            )
            print(rule, json.dumps(rows[rule]), flush=True)
    for row in rows.values():
        row["ratio"] = row["seconds"] / rows["map"]["seconds"]
    result = {"structures": options.structures, "workers": WORKERS, "rules": rows}
    print(json.dumps(result, indent=1))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
