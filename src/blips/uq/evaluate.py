"""Compute all metrics of one model on one labelled set, with bootstrap intervals, in one call.

Five levels are reported, each a table of metrics:

| level | item | metrics |
|---|---|---|
| energy | structure, eV | errors, scores, calibration, ranking |
| energy_per_atom | structure, energies divided by N, eV/atom | the same |
| forces | force component (the headline level), eV/A | errors, scores, calibration |
| forces_per_atom | atom: error norm against root of summed variances | ranking |
| forces_per_structure | mean force norm, see ranking.ForceItems | errors, ECE, ranking |

Names: ``nll`` sums the three components of a force and ``nll_component`` averages them; ``crps``
averages components and ``crps_sum`` adds them; ``rms_std`` is the root-mean-square std (sharpness);
``auroc`` asks for the tenth of the items with the largest errors. Large forces have large errors,
so ranking by the norm of the predicted force is a baseline that needs no error bars:
``spearman_force`` is its rank correlation with the error, and ``spearman_given_force`` the partial
rank correlation of std and error given that norm, which is what the std adds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from ase.data import chemical_symbols

from blips.errors import InputError
from blips.uq.bootstrap import Bootstrap
from blips.uq.checks import (
    FloatArray,
    IntArray,
    checked_counts,
    finite_array,
    positive_array,
    same_shape,
)
from blips.uq.levels import MetricTable, Tables


@dataclass(frozen=True)
class Evaluation:
    """Hold metrics of a model, as tables {metric: Interval} per level; see the module's docstring.

    Attributes:
        n_structures: number of structures S.
        n_atoms: number of atoms N in all.
        energy: per structure, in energy_unit.
        energy_per_atom: per structure, energies divided by its number of atoms.
        forces: per component, in force_unit.
        forces_per_atom: ranking of atoms by the std of their forces.
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


def evaluate(
    energy: npt.ArrayLike | None,
    energy_std: npt.ArrayLike | None,
    energy_ref: npt.ArrayLike | None,
    forces: npt.ArrayLike | None,
    forces_std: npt.ArrayLike | None,
    forces_ref: npt.ArrayLike | None,
    n_atoms: npt.ArrayLike,
    numbers: npt.ArrayLike | None = None,
    n_bootstrap: int = 1000,
    seed: int = 0,
    *,
    level: float = 0.95,
    energy_unit: str = "eV",
    force_unit: str = "eV/A",
) -> Evaluation:
    """Evaluate predicted energies and forces with their standard deviations against references.

    Args:
        energy: predicted energies [S]; None, together with energy_ref, for forces alone.
        energy_std: their standard deviations [S]; None for a deterministic model.
        energy_ref: reference energies [S].
        forces: predicted forces [N, 3]; None, together with forces_ref, for energies alone.
        forces_std: their standard deviations [N, 3]; None for a deterministic model.
        forces_ref: reference forces [N, 3], structures one after the other.
        n_atoms: number of atoms of each structure [S], adding up to N.
        numbers: atomic numbers [N] for the per-element breakdown, or None for no breakdown.
        n_bootstrap: resamples of structures for the intervals; 0 for values alone.
        seed: seed of the resampling.
        level: confidence level of the intervals.
        energy_unit: name of the unit of the energies.
        force_unit: name of the unit of the forces.

    Returns:
        An Evaluation. Metrics that the data are too few for are named in its ``omitted``; a single
        structure cannot be resampled and has values without intervals.
    """
    energies = _checked("energy", energy, energy_std, energy_ref, 1)
    vectors = _checked("forces", forces, forces_std, forces_ref, 2)
    if energies is None and vectors is None:
        raise InputError("nothing to evaluate; pass energies, forces, or both with references.")
    counts = checked_counts(n_atoms, None if vectors is None else len(vectors[0]))
    if energies is not None and len(energies[0]) != len(counts):
        raise InputError(
            f"there are {len(energies[0])} energies but n_atoms has {len(counts)} structures; "
            "expected one entry per structure in both."
        )
    elements = None if numbers is None else _checked_numbers(numbers, int(counts.sum()))
    bootstrap = Bootstrap(len(counts), n_bootstrap, level, seed)
    tables = Tables(bootstrap)
    found: dict[str, Any] = {}
    if energies is not None:
        found |= tables.energies(*energies, counts)
    if vectors is not None:
        found |= tables.forces(*vectors, counts, elements)
    return Evaluation(
        n_structures=len(counts),
        n_atoms=int(counts.sum()),
        level=level,
        n_bootstrap=n_bootstrap if bootstrap.active else 0,
        seed=seed,
        energy_unit=energy_unit,
        force_unit=force_unit,
        omitted=tuple(tables.omitted),
        **found,
    )


def _checked(
    name: str,
    mean: npt.ArrayLike | None,
    std: npt.ArrayLike | None,
    reference: npt.ArrayLike | None,
    n_dimensions: int,
) -> tuple[FloatArray, FloatArray | None, FloatArray] | None:
    """Validate one predicted quantity; None if nothing of it is given."""
    if mean is None and reference is None and std is None:
        return None
    if mean is None or reference is None:
        missing = name if mean is None else f"{name}_ref"
        raise InputError(
            f"{missing} is missing; expected {name} and {name}_ref together. Pass both or neither."
        )
    arrays = {name: finite_array(name, mean)}
    arrays[f"{name}_ref"] = finite_array(f"{name}_ref", reference)
    if std is not None:
        arrays[f"{name}_std"] = positive_array(f"{name}_std", std)
    same_shape(**arrays)
    if arrays[name].ndim != n_dimensions:
        expected = "[S], one per structure" if n_dimensions == 1 else "[N, 3], one row per atom"
        raise InputError(f"{name} has shape {arrays[name].shape}; expected {expected}. Reshape it.")
    return arrays[name], arrays.get(f"{name}_std"), arrays[f"{name}_ref"]


def _checked_numbers(numbers: npt.ArrayLike, n_atoms: int) -> IntArray:
    array = finite_array("numbers", numbers)
    whole = np.all(array == np.round(array)) and array.min() >= 0
    if array.shape != (n_atoms,) or not whole or array.max() >= len(chemical_symbols):
        raise InputError(
            f"numbers have shape {array.shape} for {n_atoms} atoms; expected one atomic number "
            f"between 0 and {len(chemical_symbols) - 1} per atom, e.g. atoms.numbers concatenated."
        )
    return array.astype(np.int64)
