"""How long does conditioning take, and how does it grow with atoms, rows and dimension?

    python -m benchmarks.conditioning --output results/benchmarks/conditioning

PaiNN with 128 features on one thread, NH3 and displaced quartz; processor seconds. What predictions
of the conditioned posterior cost is in `benchmarks.cost`.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ase import Atoms

from benchmarks.cost import some_posterior
from benchmarks.report import where
from benchmarks.structures import STD, displaced, structure
from blips.backbones import PaiNN
from blips.conversion import bayesianize
from blips.inference.linearise import LinearModel
from blips.inference.rows import collect
from blips.potential import DIMENSION


def seconds_to_condition(structures: Sequence[Atoms], rows: int, dimension: int) -> dict[str, Any]:
    """Measure seconds for the rows of all structures, and for decomposing their sum."""
    torch.manual_seed(0)
    potential = bayesianize(PaiNN())
    maps = some_posterior(potential, dimension).maps
    start = time.process_time()
    linear = LinearModel(potential.backbone, maps)
    evidence, *_ = collect(linear, structures, rows=rows, seed=0)
    middle = time.process_time()
    evidence.spectrum()
    return {
        "atoms": len(structures[0]),
        "structures": len(structures),
        "rows": rows,
        "dimension": dimension,
        "seconds_rows": round(middle - start, 3),
        "seconds_spectrum": round(time.process_time() - middle, 3),
    }


def conditioning_cost(quick: bool) -> list[dict[str, Any]]:
    """Measure growth with atoms, rows and dimension, one at a time."""
    quartz = structure(36)
    copies = [displaced(quartz, STD, seed) for seed in range(2 if quick else 16)]
    ammonia = [displaced(structure(4), STD, seed) for seed in range(8 if quick else 64)]
    found = [seconds_to_condition(ammonia, 48, 256 if quick else DIMENSION)]
    for rows in (4,) if quick else (4, 16, 48):
        found.append(seconds_to_condition(copies, rows, 256 if quick else DIMENSION))
    for dimension in (128,) if quick else (512, 1024):
        found.append(seconds_to_condition(copies, 16, dimension))
    if not quick:
        found.append(seconds_to_condition([displaced(structure(144), STD, 0)] * 4, 16, DIMENSION))
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Format the results as Markdown."""
    lines = ["| atoms | structures | rows | dimension | s, rows | s, spectrum |", "|" + "---|" * 6]
    lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in found]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("results/benchmarks/conditioning"))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = conditioning_cost(options.quick)
    content = {"where": where(), "conditioning": found}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
