"""All metrics of one model on one labelled set, with bootstrap intervals, in a single call.

Five levels are reported, each a table of metrics:

| level | item | metrics |
|---|---|---|
| energy | structure, eV | errors, scores, calibration, ranking |
| energy_per_atom | structure, energies divided by N, eV/atom | the same |
| forces | force component (the headline level), eV/A | errors, scores, calibration |
| forces_per_atom | atom: error norm against root of summed variances | ranking |
| forces_per_structure | mean force norm, see metrics.StructureForces | errors, ECE, ranking |

Names: ``nll`` sums the three components of a force and ``nll_component`` averages them; ``crps``
averages components and ``crps_sum`` adds them; ``rms_std`` is the root-mean-square sigma
(sharpness); ``auroc`` asks for the tenth of the items with the largest errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from ase.data import chemical_symbols
from scipy.special import ndtri

from blips.errors import InputError
from blips.uq import metrics
from blips.uq.bootstrap import Interval, bootstrap_intervals, bootstrap_means
from blips.uq.metrics import COVERAGE_LEVELS, FloatArray

ENCE_BINS = 10
AUROC_QUANTILE = 0.9
MetricTable = dict[str, Interval]
Transform = Callable[[FloatArray], FloatArray] | None


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


@dataclass(frozen=True)
class _Resampling:
    """How intervals are made (the structures are the groups), and what had to be left out."""

    n_structures: int
    n_bootstrap: int
    level: float
    seed: int
    omitted: list[str] = field(default_factory=list)

    @property
    def active(self) -> bool:
        return self.n_bootstrap > 0 and self.n_structures > 1

    def of_means(
        self, scores: FloatArray, groups: npt.NDArray[np.int64], transform: Transform = None
    ) -> list[Interval]:
        """Intervals of functions of the means of scores [n, P] over rows in groups [n]."""
        sizes = np.bincount(groups, minlength=self.n_structures).astype(np.float64)
        sums = np.zeros((self.n_structures, scores.shape[1]))
        for column, score in enumerate(scores.T):
            sums[:, column] = np.bincount(groups, score, minlength=self.n_structures)
        return self.of_group_sums(sums, sizes, transform)

    def of_group_sums(
        self, sums: FloatArray, sizes: FloatArray, transform: Transform = None
    ) -> list[Interval]:
        if not self.active:
            means = sums.sum(axis=0) / sizes.sum()
            values = means if transform is None else transform(means)
            return [Interval(float(value)) for value in values]
        return bootstrap_means(
            sums,
            sizes,
            transform,
            n_bootstrap=self.n_bootstrap,
            level=self.level,
            seed=self.seed,
        )

    def of_sorting(
        self,
        function: Callable[..., FloatArray],
        sort_key: FloatArray,
        *arrays: FloatArray,
        groups: npt.NDArray[np.int64],
    ) -> list[Interval]:
        """Intervals of a function that sorts; presorted rows make each resample's sort cheap."""
        order = np.argsort(sort_key, kind="stable")
        arrays = tuple(array[order] for array in arrays)
        if not self.active:
            return [Interval(float(value)) for value in function(*arrays)]
        return bootstrap_intervals(
            function,
            *arrays,
            groups=groups[order],
            n_bootstrap=self.n_bootstrap,
            level=self.level,
            seed=self.seed,
        )


def _error_table(error: FloatArray, groups: npt.NDArray[np.int64], how: _Resampling) -> MetricTable:
    """MAE, RMSE and MSE of errors [n]."""

    def transform(means: FloatArray) -> FloatArray:  # [..., 2] -> [..., 3]
        return np.stack([means[..., 0], np.sqrt(means[..., 1]), means[..., 1]], axis=-1)

    intervals = how.of_means(np.stack([np.abs(error), error**2], axis=1), groups, transform)
    return dict(zip(("mae", "rmse", "mse"), intervals, strict=True))


def _score_table(
    error: FloatArray,
    std: FloatArray,
    groups: npt.NDArray[np.int64],
    how: _Resampling,
    n_components: int,
) -> MetricTable:
    """Proper scores and calibration of errors [n] with standard deviations [n]."""
    z = error / std
    half_widths = ndtri(0.5 * (1.0 + np.array(COVERAGE_LEVELS)))
    columns = {
        "nll": metrics.gaussian_nll_scores(z, std) * n_components,
        "crps": metrics.crps_gaussian_scores(z, std),
        "zms": z**2,
        "rms_std": std**2,
    }
    if n_components > 1:
        columns["nll_component"] = columns["nll"] / n_components
        columns["crps_sum"] = columns["crps"] * n_components
    for level, half_width in zip(COVERAGE_LEVELS, half_widths, strict=True):
        columns[f"coverage_{round(100 * level)}"] = (np.abs(z) <= half_width).astype(np.float64)
    is_rms = np.array([name == "rms_std" for name in columns])

    def transform(means: FloatArray) -> FloatArray:
        return np.sqrt(means, where=is_rms, out=means.copy())

    intervals = how.of_means(np.stack(list(columns.values()), axis=1), groups, transform)
    table = dict(zip(columns, intervals, strict=True))
    table["ece"] = how.of_group_sums(
        metrics.reliability_counts(z, groups, how.n_structures),
        np.bincount(groups, minlength=how.n_structures).astype(np.float64),
        lambda p_obs: metrics.ece_of_curve(p_obs)[..., None],
    )[0]
    return table


def _ence_table(
    error: FloatArray,
    std: FloatArray,
    groups: npt.NDArray[np.int64],
    how: _Resampling,
    name: str,
) -> MetricTable:
    if len(error) < 2 * ENCE_BINS:
        how.omitted.append(f"{name}: ence needs {2 * ENCE_BINS} values, got {len(error)}")
        return {}

    def function(error: FloatArray, std: FloatArray) -> FloatArray:
        # A resample can hold fewer rows than bins when structures differ much in size.
        usable = len(error) >= ENCE_BINS
        value = metrics.ence(np.zeros_like(error), std, error, ENCE_BINS) if usable else np.nan
        return np.array([value])

    return {"ence": how.of_sorting(function, std, error, std, groups=groups)[0]}


def _ranking_table(
    uncertainty: FloatArray,
    error: FloatArray,
    groups: npt.NDArray[np.int64],
    how: _Resampling,
    name: str,
) -> MetricTable:
    """Spearman, AUROC and rejection areas of absolute errors [n] by uncertainties [n]."""
    if len(error) < 3:
        how.omitted.append(f"{name}: ranking metrics need 3 items, got {len(error)}")
        return {}
    threshold = float(np.quantile(error, AUROC_QUANTILE))

    def function(uncertainty: FloatArray, error: FloatArray) -> FloatArray:
        if len(error) < 2:
            return np.full(4, np.nan)
        curve = metrics.rejection_curve(uncertainty, error)
        rho = metrics.spearman(uncertainty, error)
        auroc = metrics.auroc(uncertainty, error, threshold)
        return np.array([rho, auroc, curve.auc, curve.auc_normalised])

    names = ("spearman", "auroc", "rejection_auc", "rejection_auc_normalised")
    intervals = how.of_sorting(function, uncertainty, uncertainty, error, groups=groups)
    return dict(zip(names, intervals, strict=True))


def _scalar_table(
    error: FloatArray,
    std: FloatArray | None,
    how: _Resampling,
    name: str,
) -> MetricTable:
    """Every metric of one scalar per structure, [S]."""
    groups = np.arange(len(error))
    table = _error_table(error, groups, how)
    if std is not None:
        table |= _score_table(error, std, groups, how, n_components=1)
        table |= _ence_table(error, std, groups, how, name)
        table |= _ranking_table(std, np.abs(error), groups, how, name)
    return table


def _component_table(
    error: FloatArray, std: FloatArray | None, atom_groups: npt.NDArray[np.int64], how: _Resampling
) -> MetricTable:
    """Errors, scores and calibration of vector components [N, C]."""
    groups = np.repeat(atom_groups, error.shape[1])
    table = _error_table(error.ravel(), groups, how)
    if std is not None:
        table |= _score_table(error.ravel(), std.ravel(), groups, how, error.shape[1])
    return table


def _structure_force_table(
    forces: FloatArray,
    std: FloatArray,
    reference: FloatArray,
    counts: npt.NDArray[np.int64],
    how: _Resampling,
) -> MetricTable:
    """Errors and ECE of the mean force norm; ranking by the root of the mean squared error."""
    reduced = metrics.structure_forces(forces, std, reference, counts)
    groups = np.arange(len(counts))
    error = reduced.norm_ref - reduced.norm
    table = _error_table(error, groups, how)
    table["ece"] = _score_table(error, reduced.norm_std, groups, how, 1)["ece"]
    error_norm = np.sqrt(reduced.squared_error)
    name = "forces_per_structure"
    return table | _ranking_table(reduced.norm_std, error_norm, groups, how, name)


def _element_tables(
    error: FloatArray,
    std: FloatArray | None,
    numbers: npt.NDArray[np.int64],
    atom_groups: npt.NDArray[np.int64],
    how: _Resampling,
) -> tuple[dict[str, MetricTable], dict[str, int]]:
    tables: dict[str, MetricTable] = {}
    counts: dict[str, int] = {}
    for number in np.unique(numbers):
        chosen = numbers == number
        symbol = chemical_symbols[number]
        chosen_std = None if std is None else std[chosen]
        tables[symbol] = _component_table(error[chosen], chosen_std, atom_groups[chosen], how)
        counts[symbol] = int(chosen.sum())
    return tables, counts


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
    arrays = {name: metrics.finite_array(name, mean)}
    arrays[f"{name}_ref"] = metrics.finite_array(f"{name}_ref", reference)
    if std is not None:
        arrays[f"{name}_std"] = metrics.positive_array(f"{name}_std", std)
    metrics.same_shape(**arrays)
    if arrays[name].ndim != n_dimensions:
        expected = "[S], one per structure" if n_dimensions == 1 else "[N, 3], one row per atom"
        raise InputError(f"{name} has shape {arrays[name].shape}; expected {expected}. Reshape it.")
    return arrays[name], arrays.get(f"{name}_std"), arrays[f"{name}_ref"]


def _checked_numbers(numbers: npt.ArrayLike, n_atoms: int) -> npt.NDArray[np.int64]:
    array = metrics.finite_array("numbers", numbers)
    whole = np.all(array == np.round(array)) and array.min() >= 0
    if array.shape != (n_atoms,) or not whole or array.max() >= len(chemical_symbols):
        raise InputError(
            f"numbers have shape {array.shape} for {n_atoms} atoms; expected one atomic number "
            f"between 0 and {len(chemical_symbols) - 1} per atom, e.g. atoms.numbers concatenated."
        )
    return array.astype(np.int64)


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
    """Evaluate predicted energies and forces with their uncertainties against references.

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
    if n_bootstrap < 0:
        raise InputError(f"n_bootstrap={n_bootstrap}; expected 0 (no intervals) or more.")
    energies = _checked("energy", energy, energy_std, energy_ref, 1)
    vectors = _checked("forces", forces, forces_std, forces_ref, 2)
    if energies is None and vectors is None:
        raise InputError("nothing to evaluate; pass energies, forces, or both with references.")
    counts = metrics.checked_counts(n_atoms, None if vectors is None else len(vectors[0]))
    if energies is not None and len(energies[0]) != len(counts):
        raise InputError(
            f"there are {len(energies[0])} energies but n_atoms has {len(counts)} structures; "
            "expected one entry per structure in both."
        )
    elements = None if numbers is None else _checked_numbers(numbers, int(counts.sum()))
    how = _Resampling(len(counts), n_bootstrap, level, seed)
    tables: dict[str, Any] = {}
    if energies is not None:
        tables |= _energy_tables(*energies, counts, how)
    if vectors is not None:
        tables |= _force_tables(*vectors, counts, elements, how)
    return Evaluation(
        n_structures=len(counts),
        n_atoms=int(counts.sum()),
        level=level,
        n_bootstrap=n_bootstrap if how.active else 0,
        seed=seed,
        energy_unit=energy_unit,
        force_unit=force_unit,
        omitted=tuple(how.omitted),
        **tables,
    )


def _energy_tables(
    energy: FloatArray,
    std: FloatArray | None,
    reference: FloatArray,
    counts: npt.NDArray[np.int64],
    how: _Resampling,
) -> dict[str, MetricTable]:
    error = reference - energy
    std_per_atom = None if std is None else std / counts
    return {
        "energy": _scalar_table(error, std, how, "energy"),
        "energy_per_atom": _scalar_table(error / counts, std_per_atom, how, "energy_per_atom"),
    }


def _force_tables(
    forces: FloatArray,
    std: FloatArray | None,
    reference: FloatArray,
    counts: npt.NDArray[np.int64],
    numbers: npt.NDArray[np.int64] | None,
    how: _Resampling,
) -> dict[str, Any]:
    error = reference - forces
    groups = np.repeat(np.arange(len(counts)), counts)  # [N] structure of every atom
    table = _component_table(error, std, groups, how)
    tables: dict[str, Any] = {"forces": table}
    if std is not None:
        component_groups = np.repeat(groups, error.shape[1])
        table |= _ence_table(error.ravel(), std.ravel(), component_groups, how, "forces")
        atoms = metrics.atom_forces(forces, std, reference)
        tables["forces_per_atom"] = _ranking_table(
            np.sqrt(atoms.variance),
            np.sqrt(atoms.squared_error),
            groups,
            how,
            "forces_per_atom",
        )
        tables["forces_per_structure"] = _structure_force_table(forces, std, reference, counts, how)
    if numbers is not None:
        tables["per_element"], tables["element_counts"] = _element_tables(
            error, std, numbers, groups, how
        )
    return tables
