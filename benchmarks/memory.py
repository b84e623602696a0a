"""How much memory do a hundred samples need under a bound, and what does the bound cost?

`predict(memory_gb=...)` draws samples in batches that fit the bound. A structure of which not even
one sample fits is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.measure import measure
from benchmarks.structures import structure
from blips.backbones import PaiNN
from blips.conversion import bayesianize
from blips.prediction import Prediction

SAMPLES = 100
LIMITS = {36: (0.125, 0.25, 0.5, 2.0), 144: (0.5, 2.0), 720: (2.0, 4.0)}  # atoms -> GB


def memory(
    sizes: Sequence[int] = tuple(LIMITS), samples: int = SAMPLES, repeats: int = 3
) -> dict[str, Any]:
    """Measure peak memory and time of `samples` samples for each bound, by number of atoms."""
    found: dict[str, Any] = {}
    for atoms in (size for size in sizes if size in LIMITS):
        torch.manual_seed(0)
        potential = bayesianize(PaiNN())
        graph = potential.backbone.graph(structure(atoms))  # type: ignore[attr-defined]
        chunks: dict[str, int] = {}

        def drawn(limit: float, potential: Any = potential, graph: Any = graph) -> Prediction:
            return potential.predict(graph, samples=samples, memory_gb=limit)

        calls: dict[str, Any] = {"base": lambda: potential.predict(graph, method="map")}  # noqa: B023
        for limit in LIMITS[atoms]:
            chunks[str(limit)] = drawn(limit).details["chunk"]
            calls[str(limit)] = lambda limit=limit, drawn=drawn: drawn(limit)
        rows = measure(calls, repeats).rows()
        found[str(atoms)] = {
            limit: {
                "samples": samples,
                "limit_megabytes": 1000 * float(limit),
                "samples_at_once": at_once,
                **{key: rows[limit][key] for key in ("peak_megabytes", "ratio")},
            }
            for limit, at_once in chunks.items()
        }
    return found


def memory_table(found: Mapping[str, Any]) -> str:
    """Format the results as Markdown."""
    lines = ["| atoms | samples | bound (MB) | samples at once | peak (MB) | time / MAP |"]
    lines.append("|" + "---|" * 6)
    for atoms, rows in found.items():
        for row in rows.values():
            cells = [atoms, row["samples"], f"{row['limit_megabytes']:.0f}"]
            cells += [row["samples_at_once"], row["peak_megabytes"], f"{row['ratio']:.1f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"
