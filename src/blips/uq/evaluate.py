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
from typing import Any

import numpy as np
from ase.data import chemical_symbols
from scipy.special import ndtri

from blips.uq import metrics
from blips.uq.bootstrap import Bootstrap, Interval
from blips.uq.checks import FloatArray, IntArray

MetricTable = dict[str, Interval]

ENCE_BINS = 10
AUROC_QUANTILE = 0.9
RANKING = ("spearman", "auroc", "rejection_auc", "rejection_auc_normalised")
BEYOND_FORCE = ("spearman_force", "spearman_given_force")
UNITS = {
    "energy": "eV",
    "energy_per_atom": "eV/atom",
    **dict.fromkeys(("forces", "forces_per_atom", "forces_per_structure"), "eV/A"),
    "stress": "eV/A^3",
}
DIMENSIONAL = {"mae", "rmse", "crps", "crps_sum", "rms_std", "rejection_auc"}


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
    level: float = 0.95  # confidence level of the intervals
    n_bootstrap: int = 0  # resamples of structures, 0 for no intervals
    seed: int = 0  # of the resampling
    omitted: tuple[str, ...] = ()  # metrics that the data are too few for

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers for JSON; intervals are {value, low, high}."""
        return {**asdict(self), "omitted": list(self.omitted)}

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat row per metric: level, metric, value, low, high, unit."""
        tables = [(name, getattr(self, name), unit) for name, unit in UNITS.items()]
        for symbol, table in self.per_element.items():
            tables.append((f"forces[{symbol}]", table, UNITS["forces"]))
        return [
            {"level": name, "metric": metric, **asdict(interval), "unit": _unit(metric, unit)}
            for name, table, unit in tables
            for metric, interval in table.items()
        ]


def _unit(metric: str, base: str) -> str:
    """Return the unit of a metric whose data have the unit ``base``; empty for pure numbers."""
    if metric == "mse":
        return f"({base})^2"
    if metric.startswith("nll"):
        return "nats"
    return base if metric in DIMENSIONAL else ""


@dataclass(frozen=True)
class Tables:
    """Compute tables over one set of structures; notes what the data are too few for."""

    bootstrap: Bootstrap
    omitted: list[str] = field(default_factory=list)

    def energies(
        self, energy: FloatArray, std: FloatArray | None, reference: FloatArray, counts: IntArray
    ) -> dict[str, MetricTable]:
        """Evaluate energies [S] of structures with so many atoms [S], as such and per atom."""
        error = reference - energy
        std_per_atom = None if std is None else std / counts
        return {
            "energy": self._scalars("energy", error, std),
            "energy_per_atom": self._scalars("energy_per_atom", error / counts, std_per_atom),
        }

    def forces(
        self,
        forces: FloatArray,
        std: FloatArray | None,
        reference: FloatArray,
        counts: IntArray,
        numbers: IntArray,
    ) -> dict[str, Any]:
        """Evaluate forces [N, 3] per component, atom, structure and element."""
        error = reference - forces
        groups = np.repeat(np.arange(len(counts)), counts)  # [N] structure of every atom
        tables: dict[str, Any] = {"forces": self.components(error, std, groups)}
        if std is not None:
            tables["forces"] |= self._ence(
                "forces", error.ravel(), std.ravel(), groups.repeat(error.shape[1])
            )
            atoms = metrics.force_items(forces, std, reference)
            tables["forces_per_atom"] = self._ranking(
                "forces_per_atom", atoms.std, atoms.error, groups, atoms.norm
            )
            structures = metrics.force_items(forces, std, reference, counts)
            tables["forces_per_structure"] = self._structures(structures)
        present = {chemical_symbols[number]: numbers == number for number in np.unique(numbers)}
        tables["per_element"] = {
            symbol: self.components(
                error[chosen], None if std is None else std[chosen], groups[chosen]
            )
            for symbol, chosen in present.items()
        }
        tables["element_counts"] = {key: int(chosen.sum()) for key, chosen in present.items()}
        return tables

    def _scalars(self, name: str, error: FloatArray, std: FloatArray | None) -> MetricTable:
        """Compute every metric of one scalar per structure, [S]."""
        groups = np.arange(len(error))
        table = self._errors(error, groups)
        if std is not None:
            table |= self._scores(error, std, groups, n_components=1)
            table |= self._ence(name, error, std, groups)
            table |= self._ranking(name, std, np.abs(error), groups)
        return table

    def components(
        self, error: FloatArray, std: FloatArray | None, groups: IntArray
    ) -> MetricTable:
        """Compute errors, scores and calibration of components [n, C] whose rows are in groups."""
        groups = np.repeat(groups, error.shape[1])
        table = self._errors(error.ravel(), groups)
        if std is not None:
            table |= self._scores(error.ravel(), std.ravel(), groups, error.shape[1])
        return table

    def _structures(self, items: metrics.ForceItems) -> MetricTable:
        """Compute errors and ECE of the mean force norm, and the ranking of structures, [S]."""
        groups = np.arange(len(items.norm))
        error = items.norm_ref - items.norm
        table = self._errors(error, groups)
        table["ece"] = self._ece(error / items.std, groups)
        ranked = self._ranking("forces_per_structure", items.std, items.error, groups, items.norm)
        return table | ranked

    def _errors(self, error: FloatArray, groups: IntArray) -> MetricTable:
        """Compute MAE, RMSE and MSE of errors [n]."""

        def transform(means: FloatArray) -> FloatArray:  # [..., 2] -> [..., 3]
            return np.stack([means[..., 0], np.sqrt(means[..., 1]), means[..., 1]], axis=-1)

        scores = np.stack([np.abs(error), error**2], axis=1)
        intervals = self.bootstrap.of_means(scores, groups, transform)
        return dict(zip(("mae", "rmse", "mse"), intervals, strict=True))

    def _scores(
        self, error: FloatArray, std: FloatArray, groups: IntArray, n_components: int
    ) -> MetricTable:
        """Compute proper scores and calibration of errors [n] with standard deviations [n]."""
        z = error / std
        columns = {
            "nll": metrics.gaussian_nll(z, std) * n_components,
            "crps": metrics.gaussian_crps(z, std),
            "zms": z**2,
            "rms_std": std**2,
        }
        if n_components > 1:
            columns["nll_component"] = columns["nll"] / n_components
            columns["crps_sum"] = columns["crps"] * n_components
        for level in metrics.COVERAGE_LEVELS:
            inside = np.abs(z) <= ndtri(0.5 * (1.0 + level))
            columns[f"coverage_{round(100 * level)}"] = inside.astype(np.float64)
        is_rms = np.array([name == "rms_std" for name in columns])

        def transform(means: FloatArray) -> FloatArray:
            return np.sqrt(means, where=is_rms, out=means.copy())

        scores = np.stack(list(columns.values()), axis=1)
        intervals = self.bootstrap.of_means(scores, groups, transform)
        return dict(zip(columns, intervals, strict=True)) | {"ece": self._ece(z, groups)}

    def _ece(self, z: FloatArray, groups: IntArray) -> Interval:
        """Compute the ECE of standardised errors [n]."""
        n_groups = self.bootstrap.n_groups
        return self.bootstrap.of_sums(
            metrics.reliability_counts(z, groups, n_groups),
            np.bincount(groups, minlength=n_groups).astype(np.float64),
            lambda p_obs: metrics.ece_of_curve(p_obs)[..., None],
        )[0]

    def _ence(self, name: str, error: FloatArray, std: FloatArray, groups: IntArray) -> MetricTable:
        """Compute the ENCE of errors [n] with standard deviations [n], if there are enough."""
        if len(error) < 2 * ENCE_BINS:
            self.omitted.append(f"{name}: ence needs {2 * ENCE_BINS} values, got {len(error)}")
            return {}

        def function(error: FloatArray, std: FloatArray) -> float:
            # A resample can hold fewer rows than bins when structures differ much in size.
            usable = len(error) >= ENCE_BINS
            return metrics.ence(np.zeros_like(error), std, error, ENCE_BINS) if usable else np.nan

        order = np.argsort(std, kind="stable")  # a presorted resample is cheap to sort
        intervals = self.bootstrap.of(function, error[order], std[order], groups=groups[order])
        return {"ence": intervals[0]}

    def _ranking(
        self,
        name: str,
        std: FloatArray,
        error: FloatArray,
        groups: IntArray,
        force: FloatArray | None = None,
    ) -> MetricTable:
        """Rank errors [n] by standard deviations [n], and by predicted force norms [n] if given."""
        if len(error) < 3:
            self.omitted.append(f"{name}: ranking metrics need 3 items, got {len(error)}")
            return {}
        threshold = float(np.quantile(error, AUROC_QUANTILE))
        names = RANKING if force is None else RANKING + BEYOND_FORCE

        def function(std: FloatArray, error: FloatArray, *ranks: IntArray) -> FloatArray:
            if len(error) < 2:
                return np.full(len(names), np.nan)
            curve = metrics.rejection_curve(std, error)
            rho = metrics.rank_correlation(ranks[0], ranks[1])
            auroc = metrics.auroc(std, error, threshold)
            values = [rho, auroc, curve.auc, curve.auc_normalised]
            if force is not None:
                std_force = metrics.rank_correlation(ranks[0], ranks[2])
                error_force = metrics.rank_correlation(ranks[1], ranks[2])
                values += [error_force, metrics.partial_correlation(rho, std_force, error_force)]
            return np.array(values)

        columns = [std, error] if force is None else [std, error, force]
        arrays = [std, error, *map(metrics.dense_ranks, columns)]
        order = np.argsort(std, kind="stable")
        intervals = self.bootstrap.of(
            function, *(array[order] for array in arrays), groups=groups[order]
        )
        return dict(zip(names, intervals, strict=True))
