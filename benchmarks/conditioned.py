"""What the conditioned posterior costs: predictions as ratios to the base, conditioning in seconds.

    python benchmarks/conditioned.py --output results/benchmarks/conditioned

PaiNN with 128 features on one thread, NH3 and displaced quartz. Ratios are of processor times over
energy and forces of the plain model, in one run (`blips.experiments.bench_measure`). Conditioning
is timed for growing atoms, rows and dimension.
"""

import argparse
import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ase import Atoms

from blips.backbones import PaiNN
from blips.bayes.condition import Evidence, normals
from blips.conversion import bayesianize
from blips.experiments.bench import CELLS, structure
from blips.experiments.bench_measure import Call, measure
from blips.experiments.bench_report import where
from blips.experiments.fast_data import displaced
from blips.inference.condition import collect
from blips.inference.conditioning import DIMENSION
from blips.inference.linearise import choose_maps
from blips.inference.posterior import ConditionedPosterior, Scale
from blips.inference.readout import READOUT, chosen_roles
from blips.potential import BayesianPotential
from blips.train.objective import plain_outputs

RANK = 1500  # directions that the data pin down
DRAWS = (8, 16, 32)
WAYS = {"conditioned, energies alone": 0, **{f"conditioned, {k} draws": k for k in DRAWS}}


def conditioned(plain: PaiNN, dimension: int = DIMENSION) -> BayesianPotential:
    """A potential with a posterior of any evidence: its values do not change the cost."""
    potential = bayesianize(copy.deepcopy(plain))
    roles, last = chosen_roles(potential.backbone, potential.conversion.roles, READOUT)
    maps = choose_maps(potential.backbone, roles, dimension, 0, last=last)
    evidence = Evidence(maps.sketch.size)
    evidence.add(normals(maps.sketch.size, min(RANK, maps.sketch.size - 1), 0))
    scale = Scale(1e-3, 1.0, {"energy": 1e-3, "forces": 1e-2})
    potential.posterior = ConditionedPosterior(
        maps, scale, "constant", 1, frozenset(range(119)), evidence
    )
    return potential


def prediction_cost(sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Ratios to the base, by number of atoms."""
    found: dict[str, Any] = {}
    for atoms in sizes:
        torch.manual_seed(0)
        plain = PaiNN()
        potential = conditioned(plain)
        graph = plain.graph(structure(atoms))

        def base(plain: PaiNN = plain, graph: Any = graph) -> Any:
            with torch.no_grad():
                return plain_outputs(plain, graph)

        calls: dict[str, Call] = {"base": base}
        for name, count in WAYS.items():
            method = "onepass" if count == 0 else "conditioned"
            calls[name] = lambda count=count, method=method, p=potential, g=graph: p.predict(
                g, method=method, samples=count or 16
            )
        for call in calls.values():
            call()  # draws are made once
        found[str(atoms)] = measure(calls, repeats).rows()
    return found


def seconds_to_condition(structures: Sequence[Atoms], rows: int, dimension: int) -> dict[str, Any]:
    """Seconds for the rows of all structures, and for the decomposition of their sum."""
    torch.manual_seed(0)
    potential = conditioned(PaiNN(), dimension)
    maps = potential.conditioned().maps
    start = time.process_time()
    seen = collect(potential.backbone, maps, structures, rows=rows, seed=0)  # type: ignore[arg-type]
    middle = time.process_time()
    seen.evidence.spectrum()
    return {
        "atoms": len(structures[0]),
        "structures": len(structures),
        "rows": rows,
        "dimension": dimension,
        "seconds_rows": round(middle - start, 3),
        "seconds_spectrum": round(time.process_time() - middle, 3),
    }


def conditioning_cost(quick: bool) -> list[dict[str, Any]]:
    """Growth with atoms, rows and dimension, one at a time."""
    quartz = structure(36)
    copies = [displaced(quartz, 0.05, seed) for seed in range(2 if quick else 16)]
    ammonia = [displaced(structure(4), 0.05, seed) for seed in range(8 if quick else 64)]
    found = [seconds_to_condition(ammonia, 48, 256 if quick else DIMENSION)]
    for rows in (4,) if quick else (4, 16, 48):
        found.append(seconds_to_condition(copies, rows, 256 if quick else DIMENSION))
    for dimension in (128,) if quick else (512, 1024):
        found.append(seconds_to_condition(copies, 16, dimension))
    if not quick:
        found.append(seconds_to_condition([displaced(structure(144), 0.05, 0)] * 4, 16, DIMENSION))
    return found


def table(found: dict[str, Any]) -> str:
    """Markdown of both parts."""
    sizes = found["prediction"]
    lines = ["| | " + " | ".join(f"{atoms} atoms" for atoms in sizes) + " |"]
    lines.append("|" + "---|" * (len(sizes) + 1))
    for name in WAYS:
        cells = [f"{rows[name]['ratio']:.2f}" for rows in sizes.values()]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    lines += [
        "",
        "| atoms | structures | rows | dimension | s, rows | s, spectrum |",
        "|" + "---|" * 6,
    ]
    for row in found["conditioning"]:
        lines.append("| " + " | ".join(str(value) for value in row.values()) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("results/benchmarks/conditioned"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (4,) if options.quick else (4, *CELLS)
    found = {
        "where": where(),
        "prediction": prediction_cost(sizes, options.repeats),
        "conditioning": conditioning_cost(options.quick),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
