"""Tables of all metrics of one model on one labelled set, with bootstrap intervals.

Each level is a table of metrics:

| level | item | metrics |
|---|---|---|
| energy | structure, eV | errors, scores, calibration, ranking |
| energy_per_atom | structure, energies divided by N, eV/atom | the same |
| forces | force component (the headline level), eV/A | errors, scores, calibration |
| forces_per_atom | atom: error norm against root of summed variances | ranking |
| forces_per_structure | mean force norm, see metrics.ForceItems | errors, ECE, ranking |
| stress | one of six stress components, eV/A^3 | errors, scores |

Names: ``nll`` sums the components of a force or stress, ``nll_component`` averages them; ``crps``
averages components and ``crps_sum`` adds them; ``rms_std`` is the root-mean-square std (sharpness);
``auroc`` asks for the tenth of the items with the largest errors. Large forces have large errors,
so ranking by the norm of the predicted force is a baseline that needs no error bars:
``spearman_force`` is its rank correlation with the error, and ``spearman_given_force`` the partial
rank correlation of std and error given that norm, which is what the std adds.

Letters in shape comments: N atoms, S structures, n any number of predictions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from ase.data import chemical_symbols

from blips.uq import metrics
from blips.uq.bootstrap import LEVEL, Bootstrap, Interval
from blips.uq.checks import FloatArray, IntArray

MetricTable = dict[str, Interval]

ENCE_BINS = 10
RANKING = ("spearman", "auroc", "rejection_auc", "rejection_auc_normalised")
BEYOND_FORCE = ("spearman_force", "spearman_given_force")
UNITS = {
    "energy": "eV",
    "energy_per_atom": "eV/atom",
    **dict.fromkeys(("forces", "forces_per_atom", "forces_per_structure"), "eV/A"),
    "stress": "eV/A^3",
}
METRIC_UNITS = {  # of data whose unit is {}; others are pure numbers
    **dict.fromkeys(("mae", "rmse", "crps", "crps_sum", "rms_std", "rejection_auc"), "{}"),
    **{"mse": "({})^2", "nll": "nats", "nll_component": "nats"},
}
ROOTS = {"rmse", "rms_std"}  # of the mean of what is averaged


@dataclass(frozen=True)
class Evaluation:
    """Hold metrics of a model, {metric: Interval} per level; see the docstring of the module."""

    n_structures: int
    n_atoms: int
    energy: MetricTable = field(default_factory=dict)
    energy_per_atom: MetricTable = field(default_factory=dict)
    forces: MetricTable = field(default_factory=dict)
    forces_per_atom: MetricTable = field(default_factory=dict)
    forces_per_structure: MetricTable = field(default_factory=dict)
    stress: MetricTable = field(default_factory=dict)
    per_element: dict[str, MetricTable] = field(default_factory=dict)  # of forces, by symbol
    element_counts: dict[str, int] = field(default_factory=dict)  # atoms of each element
    labelled: dict[str, int] = field(default_factory=dict)  # structures that have each label
    level: float = LEVEL  # of confidence of the intervals
    n_bootstrap: int = 0  # resamples of structures, 0 for no intervals
    seed: int = 0  # of the resampling

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers for JSON; intervals are {value, low, high}."""
        return asdict(self)

    def rows(self) -> dict[tuple[str, str, str], Interval]:
        """Return every metric by its level, name and unit."""
        tables = [(name, getattr(self, name), unit) for name, unit in UNITS.items()]
        for symbol, table in self.per_element.items():
            tables.append((f"forces[{symbol}]", table, UNITS["forces"]))
        return {
            (name, metric, METRIC_UNITS.get(metric, "").format(unit)): interval
            for name, table, unit in tables
            for metric, interval in table.items()
        }


class Matched(NamedTuple):
    """Hold predictions and labels of the structures that have a label, S' of S."""

    mean: FloatArray  # [S'] energies, [N', 3] forces, [S', 6] stresses
    std: FloatArray | None  # same shape
    target: FloatArray  # same shape
    chosen: np.ndarray  # [S] whether a structure has the label
    n_atoms: IntArray  # [S']


class Tables(Bootstrap):
    """Compute tables over one set of structures, without metrics that these are too few for."""

    def energies(self, found: Matched) -> dict[str, MetricTable]:
        """Evaluate energies, as such and per atom."""
        counts, std = found.n_atoms, found.std
        groups = np.arange(len(counts))
        tables: dict[str, MetricTable] = {}
        for name, size in (("energy", np.ones(len(counts))), ("energy_per_atom", counts)):
            error = (found.target - found.mean) / size
            its_std = None if std is None else std / size
            tables[name] = self.values(error, its_std, groups)
            if its_std is not None:
                tables[name] |= self._ence(error, its_std, groups)
                tables[name] |= self._ranking(its_std, np.abs(error), groups)
        return tables

    def forces(self, found: Matched, numbers: IntArray) -> dict[str, Any]:
        """Evaluate forces per component, atom, structure and element; atomic numbers are [N']."""
        forces, std, reference, _, counts = found
        error = reference - forces
        structures = np.arange(len(counts))
        groups = structures.repeat(counts)  # [N] structure of every atom
        tables: dict[str, Any] = {"forces": self.values(error, std, groups)}
        if std is not None:
            components = groups.repeat(error.shape[1])
            tables["forces"] |= self._ence(error.ravel(), std.ravel(), components)
            atoms = metrics.force_items(forces, std, reference)
            tables["forces_per_atom"] = self._ranking(atoms.std, atoms.error, groups, atoms.norm)
            items = metrics.force_items(forces, std, reference, counts)
            difference = items.norm_ref - items.norm
            tables["forces_per_structure"] = (
                self.values(difference, None, structures)
                | {"ece": self._ece(difference / items.std, structures)}
                | self._ranking(items.std, items.error, structures, items.norm)
            )
        present = {chemical_symbols[number]: numbers == number for number in np.unique(numbers)}
        tables["per_element"] = {
            symbol: self.values(error[own], None if std is None else std[own], groups[own])
            for symbol, own in present.items()
        }
        tables["element_counts"] = {symbol: int(own.sum()) for symbol, own in present.items()}
        return tables

    def values(self, error: FloatArray, std: FloatArray | None, groups: IntArray) -> MetricTable:
        """Compute errors, scores and calibration of scalars [n] or components [n, C]."""
        size = 1 if error.ndim == 1 else error.shape[1]
        error, groups = error.ravel(), groups.repeat(size)
        columns = {"mae": np.abs(error), "rmse": error**2, "mse": error**2}
        if std is None:
            return self._means(columns, groups)
        std = std.ravel()
        z = error / std
        nll, crps = metrics.gaussian_nll(z, std), metrics.gaussian_crps(z, std)
        columns |= {"nll": nll * size, "crps": crps, "zms": z**2, "rms_std": std**2}
        if size > 1:
            columns |= {"nll_component": nll, "crps_sum": crps * size}
        for level in metrics.COVERAGE_LEVELS:
            inside = metrics.within(z, level).astype(np.float64)
            columns[f"coverage_{round(100 * level)}"] = inside
        return self._means(columns, groups) | {"ece": self._ece(z, groups)}

    def _means(self, columns: dict[str, FloatArray], groups: IntArray) -> MetricTable:
        """Average columns [n], and take the roots of those that are ROOTS."""
        is_root = np.array([name in ROOTS for name in columns])
        sums = [np.bincount(groups, column, self.n_groups) for column in columns.values()]
        intervals = self.of_sums(
            np.array(sums, dtype=np.float64).T,
            groups,
            lambda means: np.sqrt(means, where=is_root, out=means.copy()),
        )
        return dict(zip(columns, intervals, strict=True))

    def _ece(self, z: FloatArray, groups: IntArray) -> Interval:
        """Compute the ECE of standardised errors [n]."""
        counts = metrics.reliability_counts(z, groups, self.n_groups)
        (interval,) = self.of_sums(
            counts, groups, lambda p_obs: metrics.ece_of_curve(p_obs)[..., None]
        )
        return interval

    def _ence(self, error: FloatArray, std: FloatArray, groups: IntArray) -> MetricTable:
        """Compute the ENCE of errors [n] with standard deviations [n], if there are enough."""
        if len(error) < 2 * ENCE_BINS:
            return {}

        def function(error: FloatArray, std: FloatArray) -> float:
            # A resample can hold fewer rows than bins when structures differ much in size.
            usable = len(error) >= ENCE_BINS
            return metrics.ence(np.zeros_like(error), std, error, ENCE_BINS) if usable else np.nan

        order = np.argsort(std, kind="stable")  # a presorted resample is cheap to sort
        (interval,) = self.of(function, error[order], std[order], groups=groups[order])
        return {"ence": interval}

    def _ranking(
        self, std: FloatArray, error: FloatArray, groups: IntArray, *force: FloatArray
    ) -> MetricTable:
        """Rank errors [n] by standard deviations [n], and by predicted force norms [n] if given."""
        if len(error) < 3:
            return {}
        threshold = float(np.quantile(error, 0.9))
        names = RANKING + BEYOND_FORCE if force else RANKING

        def function(std: FloatArray, error: FloatArray, *ranks: IntArray) -> FloatArray:
            if len(error) < 2:
                return np.full(len(names), np.nan)
            curve = metrics.rejection_curve(std, error)
            rho = metrics.rank_correlation(ranks[0], ranks[1])
            auroc = metrics.auroc(std, error, threshold)
            values = [rho, auroc, curve.auc, curve.auc_normalised]
            if force:
                by_force = [metrics.rank_correlation(rank, ranks[2]) for rank in ranks[:2]]
                values += [by_force[1], metrics.partial_correlation(rho, *by_force)]
            return np.array(values)

        order = np.argsort(std, kind="stable")
        ranks = map(metrics.dense_ranks, (std, error, *force))
        arrays = [array[order] for array in (std, error, *ranks)]
        intervals = self.of(function, *arrays, groups=groups[order])
        return dict(zip(names, intervals, strict=True))
