"""Does the memory of screening a pool that streams from disk grow with the pool?

    python -m benchmarks.pool --structures 100000 --output results/benchmarks/pool

Writes a simulated pool of displaced NH3 geometries as extxyz, screens it with a small Bayesian
PaiNN, and records the peak memory of the process at the start, after a tenth, and at the end.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from ase.build import molecule

import blips
from blips.active.candidates import Pool
from blips.active.config import load_campaign
from blips.active.executor import InlineExecutor
from blips.active.select import screen_candidates
from blips.active.store import CampaignStore
from blips.backbones import PaiNN


def peak_megabytes() -> float:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def write_pool(path: Path, count: int) -> None:
    """Write displaced NH3 molecules, frame by frame."""
    base, rng = molecule("NH3"), np.random.default_rng(0)
    header = f'{len(base)}\nProperties=species:S:1:pos:R:3 pbc="F F F"\n'
    with path.open("w") as file:
        for _ in range(count):
            positions = base.positions + rng.normal(scale=0.1, size=(4, 3))
            rows = zip(base.symbols, positions, strict=True)
            lines = "".join(f"{s} {x:.8f} {y:.8f} {z:.8f}\n" for s, (x, y, z) in rows)
            file.write(header + lines)


def screen(folder: Path, pool: Path, count: int) -> dict[str, float]:
    """Screen a pool; return memory and time."""
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(cutoff=4.0, features=8, blocks=1, num_basis=4), seed=0)
    path = blips.save(potential, folder / "model.safetensors")
    config = load_campaign(
        {
            "initial": {"structures": str(pool)},
            "explore": {"kind": "pool", "pool": str(pool)},
            "select": {"samples": 2, "chunk": 256, "keep": 10},
        }
    )
    before, begun = peak_megabytes(), time.perf_counter()
    with CampaignStore(folder / "campaign") as store:
        found = screen_candidates(Pool(pool), path, config, store, InlineExecutor(), 1, None)
    if found.seen != count:
        raise SystemExit(f"{found.seen} of {count} structures were seen")
    return {
        "structures": count,
        "pool_mb": pool.stat().st_size / 2**20,
        "seconds": time.perf_counter() - begun,
        "peak_mb_before": before,
        "peak_mb_after": peak_megabytes(),
    }


def main() -> None:
    """Screen a tenth of the pool, then the pool."""
    parser = argparse.ArgumentParser(description="Memory of screening a pool.")
    parser.add_argument("--structures", type=int, default=100_000)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for count in (options.structures // 10, options.structures):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_pool(folder / "pool.extxyz", count)
            rows.append(screen(folder, folder / "pool.extxyz", count))
        print(json.dumps(rows[-1]), flush=True)
    growth = rows[1]["peak_mb_after"] - rows[0]["peak_mb_after"]
    added = rows[1]["structures"] - rows[0]["structures"]
    result = {"rows": rows, "kilobytes_per_structure": 1024 * growth / added}
    print(json.dumps(result["kilobytes_per_structure"]))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
