"""Build the tables of each level of an evaluation; `Evaluation` says what they hold.

Letters in shape comments: N atoms, S structures, n any number of predictions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ase.data import chemical_symbols
from scipy.special import ndtri

from blips.uq import metrics, ranking
from blips.uq.bootstrap import Bootstrap, Interval
from blips.uq.checks import FloatArray, IntArray
from blips.uq.metrics import COVERAGE_LEVELS

MetricTable = dict[str, Interval]

ENCE_BINS = 10
AUROC_QUANTILE = 0.9
RANKING = ("spearman", "auroc", "rejection_auc", "rejection_auc_normalised")
BEYOND_FORCE = ("spearman_force", "spearman_given_force")


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
        numbers: IntArray | None,
    ) -> dict[str, Any]:
        """Evaluate forces [N, 3] per component, atom and structure, and by element if given."""
        error = reference - forces
        groups = np.repeat(np.arange(len(counts)), counts)  # [N] structure of every atom
        tables: dict[str, Any] = {"forces": self._components(error, std, groups)}
        if std is not None:
            tables["forces"] |= self._ence(
                "forces", error.ravel(), std.ravel(), groups.repeat(error.shape[1])
            )
            atoms = ranking.force_items(forces, std, reference)
            tables["forces_per_atom"] = self._ranking(
                "forces_per_atom", atoms.std, atoms.error, groups, atoms.norm
            )
            structures = ranking.force_items(forces, std, reference, counts)
            tables["forces_per_structure"] = self._structures(structures)
        if numbers is not None:
            present = {chemical_symbols[number]: numbers == number for number in np.unique(numbers)}
            tables["per_element"] = {
                symbol: self._components(
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

    def _components(self, error: FloatArray, std: FloatArray | None, atom_groups: IntArray):
        """Compute errors, scores and calibration of vector components [N, 3]."""
        groups = np.repeat(atom_groups, error.shape[1])
        table = self._errors(error.ravel(), groups)
        if std is not None:
            table |= self._scores(error.ravel(), std.ravel(), groups, error.shape[1])
        return table

    def _structures(self, items: ranking.ForceItems) -> MetricTable:
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
            "nll": metrics.gaussian_nll_scores(z, std) * n_components,
            "crps": metrics.crps_gaussian_scores(z, std),
            "zms": z**2,
            "rms_std": std**2,
        }
        if n_components > 1:
            columns["nll_component"] = columns["nll"] / n_components
            columns["crps_sum"] = columns["crps"] * n_components
        for level in COVERAGE_LEVELS:
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
            curve = ranking.rejection_curve(std, error)
            rho = ranking.rank_correlation(ranks[0], ranks[1])
            auroc = ranking.auroc(std, error, threshold)
            values = [rho, auroc, curve.auc, curve.auc_normalised]
            if force is not None:
                std_force = ranking.rank_correlation(ranks[0], ranks[2])
                error_force = ranking.rank_correlation(ranks[1], ranks[2])
                values += [error_force, ranking.partial_correlation(rho, std_force, error_force)]
            return np.array(values)

        columns = [std, error] if force is None else [std, error, force]
        arrays = [std, error, *map(ranking.dense_ranks, columns)]
        order = np.argsort(std, kind="stable")
        intervals = self.bootstrap.of(
            function, *(array[order] for array in arrays), groups=groups[order]
        )
        return dict(zip(names, intervals, strict=True))
