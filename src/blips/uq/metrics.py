"""Compute errors, scores, calibration and ranking of arrays, each defined where it is computed.

Throughout, ``mean`` and ``std`` describe a Gaussian prediction N(mean, std^2) of ``target``:

    error e = target - mean        standardised error z = e / std

Arrays share one shape, nothing is broadcast, and any consistent unit works.

Ranking metrics look at the order of the standard deviations alone, so no recalibration by an
increasing map changes them. They take one non-negative score and one non-negative error per item,
[n], and treat equal scores as if their order were random.

Letters in shape comments: N atoms, S structures, P levels of probability, n any number of
predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.integrate import trapezoid
from scipy.special import ndtr, ndtri
from scipy.stats import rankdata

from blips.errors import InputError, refuse_below
from blips.uq.checks import (
    FloatArray,
    IntArray,
    checked_prediction,
    checked_ranking,
    standardised_error,
)

ECE_LEVELS: FloatArray = np.linspace(0.0, 1.0, 101)  # probabilities, of reliability and ECE
COVERAGE_LEVELS = (0.68, 0.90, 0.95)  # probabilities of the central intervals that are reported


# --------------------------------------------------------------------------------- proper scores
def gaussian_nll(z: FloatArray, std: FloatArray) -> FloatArray:
    """Return the negative log density of each target, [log(2 pi) + z^2] / 2 + log(std), in nats."""
    return 0.5 * (np.log(2.0 * np.pi) + z**2) + np.log(std)


def gaussian_crps(z: FloatArray, std: FloatArray) -> FloatArray:
    """Return the CRPS of each target, std * [z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi)]."""
    density = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    return std * (z * (2.0 * ndtr(z) - 1.0) + 2.0 * density - 1.0 / np.sqrt(np.pi))


# ----------------------------------------------------------------------------------- calibration
def reliability_counts(z: FloatArray, groups: IntArray, n_groups: int) -> FloatArray:
    """Count, per group and level of ECE_LEVELS, the z at or below the normal quantile: [S, P]."""
    n_levels = len(ECE_LEVELS)
    first_level = np.searchsorted(ndtri(ECE_LEVELS), z, side="left")  # [n], quantile(0) = -inf
    counts = np.bincount(groups * n_levels + first_level, minlength=n_groups * n_levels)
    return np.cumsum(counts.reshape(n_groups, n_levels), axis=1).astype(np.float64)


def reliability_curve(
    mean: ArrayLike, std: ArrayLike, target: ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Compute predicted and observed cumulative probability, (p, p_obs), both [101].

    p = 0, 0.01, ..., 1, and p_obs(p) is the fraction of targets at or below the predicted
    p-quantile, mean + std * Phi^-1(p). Perfect calibration is p_obs = p.
    """
    z = standardised_error(mean, std, target)
    counts = reliability_counts(z.ravel(), np.zeros(z.size, dtype=np.int64), 1)[0]
    return ECE_LEVELS.copy(), counts / z.size


def ece_of_curve(p_obs: FloatArray) -> FloatArray:
    """Integrate |p - p_obs(p)| over ECE_LEVELS: [..., P] -> [...]."""
    return trapezoid(np.abs(p_obs - ECE_LEVELS), ECE_LEVELS)


def ece(mean: ArrayLike, std: ArrayLike, target: ArrayLike) -> float:
    """Compute the expected calibration error, the integral over p in (0, 1) of |p - p_obs(p)|.

    See reliability_curve for p_obs and its fixed grid. 0 is perfect, 0.25 the value of a std that
    is far too large, and nothing exceeds 0.5 (all targets on one side, far outside).
    """
    return float(ece_of_curve(reliability_curve(mean, std, target)[1]))


def within(z: FloatArray, level: float) -> NDArray[np.bool_]:
    """Say which standardised errors lie in the central Gaussian interval of that probability."""
    return np.abs(z) <= ndtri(0.5 * (1.0 + level))


def coverage(mean: ArrayLike, std: ArrayLike, target: ArrayLike, level: float = 0.9) -> float:
    """Count the fraction of targets inside the central Gaussian interval of a probability."""
    z = standardised_error(mean, std, target)
    if not 0.0 < level < 1.0:
        raise InputError(f"level is {level}; expected a probability above 0 and below 1.")
    return float(np.mean(within(z, level)))


def binned_errors(
    mean: ArrayLike, std: ArrayLike, target: ArrayLike, n_bins: int = 10
) -> tuple[FloatArray, FloatArray]:
    """Compute root-mean-square std and error, both [n_bins], in bins of equal count by std.

    Equal stds share their mean squared error, so the order of the data never matters.
    """
    mean, std, target = checked_prediction(mean, std, target)
    if not 1 <= n_bins <= std.size:
        raise InputError(
            f"n_bins={n_bins} with {std.size} predictions; expected between 1 and the number of "
            "predictions. Use fewer bins or more data."
        )
    order = np.argsort(std, axis=None, kind="stable")
    sorted_std = std.ravel()[order]
    squared_error = tie_averaged(sorted_std, (target - mean).ravel()[order] ** 2)
    starts = np.arange(n_bins) * std.size // n_bins
    counts = np.diff(starts, append=std.size)
    rms_std = np.sqrt(np.add.reduceat(sorted_std**2, starts) / counts)
    return rms_std, np.sqrt(np.add.reduceat(squared_error, starts) / counts)


def ence(mean: ArrayLike, std: ArrayLike, target: ArrayLike, n_bins: int = 10) -> float:
    """Compute the expected normalised calibration error.

    The mean of |RMS std - RMSE| / RMS std over the bins of binned_errors. It depends on n_bins and
    is above 0 for finite bins even if calibrated (about sqrt(n_bins / (pi n))); compare it only at
    equal n and n_bins.
    """
    rms_std, rmse = binned_errors(mean, std, target, n_bins)
    return float(np.mean(np.abs(rms_std - rmse) / rms_std))


# --------------------------------------------------------------------------------------- ranking
class ForceItems(NamedTuple):
    """Forces reduced to one row per item (atom or structure), each [n] eV/A.

    Over a structure, norms and squares are averaged over its atoms. (The mean force VECTOR is the
    net force, zero for every conservative model whatever its quality.) There ``std`` has the scale
    of one atom's force error: it ranks structures, but exceeds the standard deviation of an average
    over many atoms with independent errors, so even an ideal model has an ECE above 0.
    """

    norm: FloatArray  # of the predicted force
    norm_ref: FloatArray  # of the reference
    std: FloatArray  # root of the summed variances of the components
    error: FloatArray  # root of the squared norm of the force error


def force_items(
    forces: ArrayLike,
    forces_std: ArrayLike,
    forces_ref: ArrayLike,
    n_atoms: ArrayLike | None = None,
) -> ForceItems:
    """Reduce force components [N, 3] to items per atom [N], or per structure [S] with n_atoms."""
    forces, std, reference = checked_prediction(forces, forces_std, forces_ref)
    counts = np.ones(len(forces), dtype=np.int64) if n_atoms is None else np.asarray(n_atoms)
    if forces.ndim != 2 or counts.sum() != len(forces) or counts.min() < 1:
        raise InputError(
            f"forces have shape {forces.shape}, for {counts.sum()} atoms; expected [N, 3], one row "
            "per atom, and n_atoms of at least 1 that add up to N."
        )
    starts = np.cumsum(counts) - counts

    def atom_mean(per_atom: FloatArray) -> FloatArray:  # [N] -> [n]
        return np.add.reduceat(per_atom, starts) / counts

    return ForceItems(
        norm=atom_mean(np.linalg.norm(forces, axis=1)),
        norm_ref=atom_mean(np.linalg.norm(reference, axis=1)),
        std=np.sqrt(atom_mean(np.sum(std**2, axis=1))),
        error=np.sqrt(atom_mean(np.sum((reference - forces) ** 2, axis=1))),
    )


def tie_averaged(sorted_key: FloatArray, values: FloatArray) -> FloatArray:
    """Replace values by their mean over equal keys: the expectation over random tie-breaking."""
    starts = np.flatnonzero(np.diff(sorted_key, prepend=-np.inf) > 0.0)
    counts = np.diff(starts, append=len(sorted_key))
    return np.repeat(np.add.reduceat(values, starts) / counts, counts)


def dense_ranks(values: FloatArray) -> IntArray:
    """Rank the distinct values in ascending order, 0, 1, ...; equal values share a rank."""
    return np.unique(values, return_inverse=True)[1]


def rank_correlation(first: IntArray, second: IntArray) -> float:
    """Compute Spearman's rho of items given by dense ranks, [n] each, without sorting.

    Pearson's correlation of mid-ranks, where equal items share the mean of their positions. Any
    selection of rows of dense_ranks will do, with gaps and repeats, so that a bootstrap sorts once
    and every resample costs O(n). 0 if either array is constant, where rho is undefined.
    """
    a, b = _centred_midranks(first), _centred_midranks(second)
    scale = np.sqrt((a @ a) * (b @ b))
    return float(np.clip(a @ b / scale, -1.0, 1.0)) if scale > 0.0 else 0.0


def _centred_midranks(dense: IntArray) -> FloatArray:
    """Return the mean position (from 1) among equal items, minus the mean of all, (n + 1)/2."""
    counts = np.bincount(dense)
    return (np.cumsum(counts) - 0.5 * (counts - 1))[dense] - 0.5 * (len(dense) + 1)


def partial_correlation(rho_xy: float, rho_xz: float, rho_yz: float) -> float:
    """Correlate x and y after removing what z explains of each.

        rho(x, y | z) = (rho_xy - rho_xz rho_yz) / sqrt((1 - rho_xz^2)(1 - rho_yz^2))

    0 where z explains x or y wholly and nothing is left to correlate.
    """
    rest = (1.0 - rho_xz**2) * (1.0 - rho_yz**2)
    if rest <= 1e-12:
        return 0.0
    return float(np.clip((rho_xy - rho_xz * rho_yz) / np.sqrt(rest), -1.0, 1.0))


def spearman(std: ArrayLike, error: ArrayLike) -> float:
    """Compute Spearman's rank correlation of std and error, [n] each, ties sharing ranks.

    Ranks do not change under the square, so variances and squared errors give the same number. 0
    where it is undefined because an array is constant.
    """
    std, error = checked_ranking(std, error)
    refuse_below(2, items=len(std))
    return rank_correlation(dense_ranks(std), dense_ranks(error))


def auroc(std: ArrayLike, error: ArrayLike, threshold: float) -> float:
    """Compute the area under the ROC curve for detecting large errors by standard deviation.

    The probability that a random item with error > threshold has a larger std than a random item
    with error <= threshold; equal stds count one half (Mann-Whitney U). Returns 0.5, the value of
    guessing, if either class is empty.
    """
    std, error = checked_ranking(std, error)
    event = error > threshold
    n_event, n_rest = int(event.sum()), int((~event).sum())
    if n_event == 0 or n_rest == 0:
        return 0.5
    rank_sum = rankdata(std)[event].sum()
    return float((rank_sum - 0.5 * n_event * (n_event + 1)) / (n_event * n_rest))


@dataclass(frozen=True)
class RejectionCurve:
    """Hold the error that remains after the items of largest std are dropped.

    With n items, R(k/n) is the mean error of the n - k items of least std, k = 0..n-1. The
    normalised area is (auc - oracle auc) / (random - oracle auc): 0 oracle, 1 random, above 1 worse
    than random; 1 if all errors are equal, when no order helps.
    """

    fraction: FloatArray  # dropped, k/n, [n]
    error: FloatArray  # R, the mean error that remains, [n]
    oracle: FloatArray  # the same when the items of largest error are dropped first, [n]
    random: float  # expected R when dropping at random, at every fraction: the mean error
    auc: float  # mean of `error` over k
    auc_normalised: float


def rejection_curve(std: ArrayLike, error: ArrayLike) -> RejectionCurve:
    """Compute the error-rejection curve of non-negative errors [n] by standard deviations [n].

    Equal stds are dropped in random order (their expected error is used), so a constant std gives
    exactly the random curve.
    """
    std, error = checked_ranking(std, error)
    n = len(error)
    order = np.argsort(std, kind="stable")
    kept = np.arange(1, n + 1)  # [n] items kept, from the least std to all
    by_std = np.cumsum(tie_averaged(std[order], error[order])) / kept
    by_error = np.cumsum(np.sort(error)) / kept
    random = float(error.mean())
    auc, oracle_auc = float(by_std.mean()), float(by_error.mean())
    range_ = random - oracle_auc
    normalised = (auc - oracle_auc) / range_ if np.ptp(error) > 0.0 and range_ > 0.0 else 1.0
    return RejectionCurve(np.arange(n) / n, by_std[::-1], by_error[::-1], random, auc, normalised)
