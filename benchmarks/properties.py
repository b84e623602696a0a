"""What do error bars of elastic constants cost, beside the plain calculation?

Relaxing, straining and relaxing ions of crystals with CHGNet, one thread, ratios as in
`benchmarks.measure`: the plain model alone; to first order; with 16 members of their own.

Run ``python -m benchmarks.properties --output results/benchmarks/properties``.
"""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from ase import Atoms
from ase.build import bulk

from benchmarks.measure import measure
from blips.properties import elastic
from blips.properties.calculation import Calculation
from blips.properties.elastic import STRAIN, Strained
from blips.train.released import load_released
from blips.train.run import environment

CRYSTALS = {
    "MgO, 2 atoms": bulk("MgO", "rocksalt", a=4.25),
    "Mg, hcp, 2 atoms": bulk("Mg"),
    "Si, 8 atoms": bulk("Si", cubic=True),
}


def costs(name: str, atoms: Atoms, repeats: int) -> dict[str, Any]:
    """Measure the ratios of one crystal."""
    potential = load_released("chgnet")

    def plain() -> None:
        run = Calculation(potential)
        mean = run.relaxed_crystal(atoms, "elastic constants")
        Strained(run, mean, STRAIN).hessian(run.plain)

    calls = {
        "base": plain,
        "linear": lambda: elastic(potential, atoms),
        "members": lambda: elastic(potential, atoms, method="members"),
    }
    found = measure(calls, repeats).rows()
    return {"crystal": name, **{way: found[way]["ratio"] for way in ("linear", "members")}}


def main() -> None:
    """Measure and write a .json and a .md file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [costs(name, atoms, arguments.repeats) for name, atoms in CRYSTALS.items()]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment(), "repeats": arguments.repeats, "rows": rows}
    arguments.output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    lines = ["| crystal | first order / plain | 16 members / plain |", "|---|---|---|"]
    lines += [f"| {row['crystal']} | {row['linear']} | {row['members']} |" for row in rows]
    arguments.output.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
