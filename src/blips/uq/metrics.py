"""Compute errors, proper scores and calibration on numpy arrays, each defined where it is computed.

Throughout, ``mean`` and ``std`` describe a Gaussian prediction N(mean, std^2) of ``target``:

    error e = target - mean        standardised error z = e / std

Arrays share one shape. In arrays of two or more dimensions the last axis holds the components of a
vector (forces: [N, 3]); one-dimensional arrays hold scalars (energies: [S]). Any consistent unit
works; in this package energies are in eV and forces in eV/A.

Letters in shape comments: N atoms, S structures, P levels of probability, n any number of
predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from blips.errors import InputError
from blips.uq.checks import (
    FloatArray,
    IntArray,
    checked_pair,
    finite_array,
    standardised_error,
)
from blips.uq.ranking import tie_averaged

Components = Literal["sum", "mean"]

ECE_LEVELS: FloatArray = np.linspace(0.0, 1.0, 101)
"""The fixed grid of probabilities on which reliability and ECE are evaluated."""

COVERAGE_LEVELS = (0.68, 0.90, 0.95)
"""Nominal probabilities of the central intervals whose coverage is reported."""


# ---------------------------------------------------------------------- errors and proper scores
def mse(mean: npt.ArrayLike, target: npt.ArrayLike) -> float:
    """Average the squared error over all values."""
    mean, target = checked_pair(mean, target)
    return float(np.mean((target - mean) ** 2))


def mae(mean: npt.ArrayLike, target: npt.ArrayLike) -> float:
    """Average the absolute error over all values."""
    mean, target = checked_pair(mean, target)
    return float(np.mean(np.abs(target - mean)))


def gaussian_nll_scores(z: FloatArray, std: FloatArray) -> FloatArray:
    """Give the negative log density of each target, [log(2 pi) + z^2] / 2 + log(std), in nats."""
    return 0.5 * (np.log(2.0 * np.pi) + z**2) + np.log(std)


def gaussian_nll(
    mean: npt.ArrayLike,
    std: npt.ArrayLike,
    target: npt.ArrayLike,
    components: Components = "sum",
) -> float:
    """Average the Gaussian negative log-likelihood over atoms and structures, in nats.

    Args:
        mean: predictions, [S] or [N, 3].
        std: standard deviations, same shape.
        target: references, same shape.
        components: "sum" adds the components of a vector (the headline definition for forces and
            positions), "mean" averages them. One-dimensional arrays have a single component.
    """
    return _over_components(gaussian_nll_scores(*standardised_error(mean, std, target)), components)


def crps_gaussian_scores(z: FloatArray, std: FloatArray) -> FloatArray:
    """Give the CRPS of each target, std * [z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi)]."""
    density = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    return std * (z * (2.0 * ndtr(z) - 1.0) + 2.0 * density - 1.0 / np.sqrt(np.pi))


def crps_gaussian(
    mean: npt.ArrayLike,
    std: npt.ArrayLike,
    target: npt.ArrayLike,
    components: Components = "mean",
) -> float:
    """Average the continuous ranked probability score of a Gaussian, in the unit of the target.

    Args:
        mean: predictions, [S] or [N, 3].
        std: standard deviations, same shape.
        target: references, same shape.
        components: "mean" averages over components, "sum" adds the components of a vector first.
    """
    return _over_components(
        crps_gaussian_scores(*standardised_error(mean, std, target)), components
    )


def _over_components(scores: FloatArray, components: Components) -> float:
    """Average scores, either over everything or after summing the last axis of vectors."""
    if components not in ("sum", "mean"):
        raise InputError(f"components={components!r} is unknown; expected 'sum' or 'mean'.")
    if components == "sum" and scores.ndim > 1:
        scores = scores.sum(axis=-1)
    return float(scores.mean())


# ----------------------------------------------------------------------------------- calibration
def reliability_counts(z: FloatArray, groups: IntArray, n_groups: int) -> FloatArray:
    """Count, per group and level of ECE_LEVELS, the z at or below the normal quantile: [S, P]."""
    n_levels = len(ECE_LEVELS)
    first_level = np.searchsorted(ndtri(ECE_LEVELS), z, side="left")  # [n], quantile(0) = -inf
    counts = np.bincount(groups * n_levels + first_level, minlength=n_groups * n_levels)
    return np.cumsum(counts.reshape(n_groups, n_levels), axis=1).astype(np.float64)


def reliability_curve(
    mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Compute observed against predicted cumulative probability.

    Returns:
        (p, p_obs), both [101]: p = 0, 0.01, ..., 1, and p_obs(p) the fraction of targets at or
        below the predicted p-quantile, mean + std * Phi^-1(p). Perfect calibration is p_obs = p.
    """
    z, _ = standardised_error(mean, std, target)
    counts = reliability_counts(z.ravel(), np.zeros(z.size, dtype=np.int64), 1)[0]
    return ECE_LEVELS.copy(), counts / z.size


def ece_of_curve(p_obs: FloatArray) -> FloatArray:
    """Integrate |p - p_obs(p)| over ECE_LEVELS (trapezoid): [..., P] -> [...]."""
    gap = np.abs(p_obs - ECE_LEVELS)
    return np.sum(0.5 * (gap[..., 1:] + gap[..., :-1]) * np.diff(ECE_LEVELS), axis=-1)


def ece(mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike) -> float:
    """Compute the expected calibration error, the integral over p in (0, 1) of |p - p_obs(p)|.

    See reliability_curve for p_obs and its fixed grid. 0 is perfect, 0.25 the value of a std that
    is far too large, and nothing exceeds 0.5 (all targets on one side, far outside).
    """
    return float(ece_of_curve(reliability_curve(mean, std, target)[1]))


def zms(mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike) -> float:
    """Average z^2 over all values; 1 if calibrated, above 1 if overconfident."""
    z, _ = standardised_error(mean, std, target)
    return float(np.mean(z**2))


def coverage(
    mean: npt.ArrayLike,
    std: npt.ArrayLike,
    target: npt.ArrayLike,
    levels: Sequence[float] = COVERAGE_LEVELS,
) -> FloatArray:
    """Count the fraction of targets inside the central Gaussian interval of each level, [levels].

    A target is covered at level c if |z| <= Phi^-1((1 + c) / 2).
    """
    z, _ = standardised_error(mean, std, target)
    wanted = finite_array("levels", levels)
    if wanted.min() <= 0.0 or wanted.max() >= 1.0:
        raise InputError(f"levels are {levels}; expected probabilities above 0 and below 1.")
    return np.array([np.mean(np.abs(z) <= ndtri(0.5 * (1.0 + level))) for level in wanted])


def binned_errors(
    mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike, n_bins: int = 10
) -> tuple[FloatArray, FloatArray]:
    """Compute root-mean-square std and error in bins of equal count, ordered by std.

    Equal stds share their mean squared error, so the order of the data never matters.

    Returns:
        (rms_std, rmse), both [n_bins], in the unit of the target.
    """
    z, std = standardised_error(mean, std, target)
    if not 1 <= n_bins <= std.size:
        raise InputError(
            f"n_bins={n_bins} with {std.size} predictions; expected between 1 and the number of "
            "predictions. Use fewer bins or more data."
        )
    order = np.argsort(std, axis=None, kind="stable")
    sorted_std = std.ravel()[order]
    squared_error = tie_averaged(sorted_std, (z.ravel()[order] * sorted_std) ** 2)
    starts = np.arange(n_bins) * std.size // n_bins
    counts = np.diff(starts, append=std.size)
    rms_std = np.sqrt(np.add.reduceat(sorted_std**2, starts) / counts)
    return rms_std, np.sqrt(np.add.reduceat(squared_error, starts) / counts)


def ence(mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike, n_bins: int = 10) -> float:
    """Compute the expected normalised calibration error.

    The mean of |RMS std - RMSE| / RMS std over the bins of binned_errors. It depends on n_bins and
    is above 0 for finite bins even if calibrated (about sqrt(n_bins / (pi n))); compare it only at
    equal n and n_bins.
    """
    rms_std, rmse = binned_errors(mean, std, target, n_bins)
    return float(np.mean(np.abs(rms_std - rmse) / rms_std))
