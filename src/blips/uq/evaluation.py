"""The result of an evaluation: tables of metrics with intervals, by level.

Five levels are reported, each a table of metrics:

| level | item | metrics |
|---|---|---|
| energy | structure, eV | errors, scores, calibration, ranking |
| energy_per_atom | structure, energies divided by N, eV/atom | the same |
| forces | force component (the headline level), eV/A | errors, scores, calibration |
| forces_per_atom | atom: error norm against root of summed variances | ranking |
| forces_per_structure | mean force norm, see forces.StructureForces | errors, ECE, ranking |

Names: ``nll`` sums the three components of a force and ``nll_component`` averages them; ``crps``
averages components and ``crps_sum`` adds them; ``rms_std`` is the root-mean-square sigma
(sharpness); ``auroc`` asks for the tenth of the items with the largest errors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from blips.uq.bootstrap import Interval

MetricTable = dict[str, Interval]


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a model, as tables {metric: Interval} per level; see the module's docstring.

    Attributes:
        n_structures: number of structures S.
        n_atoms: number of atoms N in all.
        energy: per structure, in energy_unit.
        energy_per_atom: per structure, energies divided by its number of atoms.
        forces: per component, in force_unit.
        forces_per_atom: ranking of atoms by their force uncertainty.
        forces_per_structure: mean force norm and ranking of structures.
        per_element: component-level force metrics by chemical symbol.
        element_counts: number of atoms of each element.
        level: confidence level of the intervals.
        n_bootstrap: number of resamples of structures, 0 for no intervals.
        seed: seed of the resampling.
        energy_unit: unit of the energies.
        force_unit: unit of the forces.
        omitted: metrics that were left out, and why.
    """

    n_structures: int
    n_atoms: int
    energy: MetricTable = field(default_factory=dict)
    energy_per_atom: MetricTable = field(default_factory=dict)
    forces: MetricTable = field(default_factory=dict)
    forces_per_atom: MetricTable = field(default_factory=dict)
    forces_per_structure: MetricTable = field(default_factory=dict)
    per_element: dict[str, MetricTable] = field(default_factory=dict)
    element_counts: dict[str, int] = field(default_factory=dict)
    level: float = 0.95
    n_bootstrap: int = 0
    seed: int = 0
    energy_unit: str = "eV"
    force_unit: str = "eV/A"
    omitted: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers for JSON; intervals are {value, low, high}."""
        return {**asdict(self), "omitted": list(self.omitted)}

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat row per metric: level, metric, value, low, high, unit."""
        units = {
            "energy": self.energy_unit,
            "energy_per_atom": f"{self.energy_unit}/atom",
            "forces": self.force_unit,
            "forces_per_atom": self.force_unit,
            "forces_per_structure": self.force_unit,
        }
        tables = [(name, getattr(self, name), unit) for name, unit in units.items()]
        tables += [
            (f"forces[{symbol}]", table, self.force_unit)
            for symbol, table in self.per_element.items()
        ]
        return [
            {"level": name, "metric": metric, **asdict(interval), "unit": _unit(metric, unit)}
            for name, table, unit in tables
            for metric, interval in table.items()
        ]


def _unit(metric: str, base: str) -> str:
    """Give the unit of a metric whose data have the unit ``base``; empty for pure numbers."""
    if metric == "mse":
        return f"({base})^2"
    if metric.startswith("nll"):
        return "nats"
    dimensional = {"mae", "rmse", "crps", "crps_sum", "rms_std", "rejection_auc"}
    return base if metric in dimensional else ""
