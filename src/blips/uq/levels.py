"""The tables of each level of an evaluation; blips.uq.evaluation says what they hold.

Letters in shape comments: N atoms, S structures, n any number of predictions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ase.data import chemical_symbols
from scipy.special import ndtri

from blips.uq import metrics, ranking
from blips.uq.checks import FloatArray, IntArray
from blips.uq.evaluation import MetricTable
from blips.uq.forces import atom_forces, structure_forces
from blips.uq.metrics import COVERAGE_LEVELS
from blips.uq.resampling import Resampling

ENCE_BINS = 10
AUROC_QUANTILE = 0.9


def energy_tables(
    energy: FloatArray,
    std: FloatArray | None,
    reference: FloatArray,
    counts: IntArray,
    how: Resampling,
) -> dict[str, MetricTable]:
    """Tables of energies [S] in structures of so many atoms [S], as such and per atom."""
    error = reference - energy
    std_per_atom = None if std is None else std / counts
    return {
        "energy": _scalar_table(error, std, how, "energy"),
        "energy_per_atom": _scalar_table(error / counts, std_per_atom, how, "energy_per_atom"),
    }


def force_tables(
    forces: FloatArray,
    std: FloatArray | None,
    reference: FloatArray,
    counts: IntArray,
    numbers: IntArray | None,
    how: Resampling,
) -> dict[str, Any]:
    """Tables of forces [N, 3] per component, atom and structure, and by element if given."""
    error = reference - forces
    groups = np.repeat(np.arange(len(counts)), counts)  # [N] structure of every atom
    table = _component_table(error, std, groups, how)
    tables: dict[str, Any] = {"forces": table}
    if std is not None:
        component_groups = np.repeat(groups, error.shape[1])
        table |= _ence_table(error.ravel(), std.ravel(), component_groups, how, "forces")
        atoms = atom_forces(forces, std, reference)
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


def _error_table(error: FloatArray, groups: IntArray, how: Resampling) -> MetricTable:
    """MAE, RMSE and MSE of errors [n]."""

    def transform(means: FloatArray) -> FloatArray:  # [..., 2] -> [..., 3]
        return np.stack([means[..., 0], np.sqrt(means[..., 1]), means[..., 1]], axis=-1)

    intervals = how.of_means(np.stack([np.abs(error), error**2], axis=1), groups, transform)
    return dict(zip(("mae", "rmse", "mse"), intervals, strict=True))


def _score_table(
    error: FloatArray,
    std: FloatArray,
    groups: IntArray,
    how: Resampling,
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
    groups: IntArray,
    how: Resampling,
    name: str,
) -> MetricTable:
    """ENCE of errors [n] with standard deviations [n], if there are enough of them."""
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
    groups: IntArray,
    how: Resampling,
    name: str,
) -> MetricTable:
    """Spearman, AUROC and rejection areas of absolute errors [n] by uncertainties [n]."""
    if len(error) < 3:
        how.omitted.append(f"{name}: ranking metrics need 3 items, got {len(error)}")
        return {}
    threshold = float(np.quantile(error, AUROC_QUANTILE))

    def function(
        uncertainty: FloatArray, error: FloatArray, uncertainty_rank: IntArray, error_rank: IntArray
    ) -> FloatArray:
        if len(error) < 2:
            return np.full(4, np.nan)
        curve = ranking.rejection_curve(uncertainty, error)
        rho = ranking.rank_correlation(uncertainty_rank, error_rank)
        auroc = ranking.auroc(uncertainty, error, threshold)
        return np.array([rho, auroc, curve.auc, curve.auc_normalised])

    names = ("spearman", "auroc", "rejection_auc", "rejection_auc_normalised")
    ranks = ranking.dense_ranks(uncertainty), ranking.dense_ranks(error)
    intervals = how.of_sorting(function, uncertainty, uncertainty, error, *ranks, groups=groups)
    return dict(zip(names, intervals, strict=True))


def _scalar_table(
    error: FloatArray,
    std: FloatArray | None,
    how: Resampling,
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
    error: FloatArray, std: FloatArray | None, atom_groups: IntArray, how: Resampling
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
    counts: IntArray,
    how: Resampling,
) -> MetricTable:
    """Errors and ECE of the mean force norm; ranking by the root of the mean squared error."""
    reduced = structure_forces(forces, std, reference, counts)
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
    numbers: IntArray,
    atom_groups: IntArray,
    how: Resampling,
) -> tuple[dict[str, MetricTable], dict[str, int]]:
    """Component-level tables, and numbers of atoms, by chemical symbol."""
    tables: dict[str, MetricTable] = {}
    counts: dict[str, int] = {}
    for number in np.unique(numbers):
        chosen = numbers == number
        symbol = chemical_symbols[number]
        chosen_std = None if std is None else std[chosen]
        tables[symbol] = _component_table(error[chosen], chosen_std, atom_groups[chosen], how)
        counts[symbol] = int(chosen.sum())
    return tables, counts
