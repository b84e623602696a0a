"""Error and uncertainty metrics on numpy arrays; every definition is stated where it is computed.

Throughout, ``mean`` and ``std`` describe a Gaussian prediction N(mean, std^2) of ``target``:

    error e = target - mean        standardised error z = e / std

Arrays share one shape. In arrays of two or more dimensions the last axis holds the components of a
vector (forces: [N, 3]); one-dimensional arrays hold scalars (energies: [S]). Any consistent unit
works; in this package energies are in eV and forces in eV/A.

Letters in shape comments: N atoms, S structures, n any number of predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri
from scipy.stats import spearmanr

from blips.errors import InputError

FloatArray = npt.NDArray[np.float64]
Components = Literal["sum", "mean"]

ECE_LEVELS: FloatArray = np.linspace(0.0, 1.0, 101)
"""The fixed grid of probabilities on which reliability and ECE are evaluated."""

COVERAGE_LEVELS = (0.68, 0.90, 0.95)
"""Nominal probabilities of the central intervals whose coverage is reported."""


# ---------------------------------------------------------------------------------- input checks
def finite_array(name: str, values: npt.ArrayLike) -> FloatArray:
    """Return ``values`` as a non-empty, finite float64 array or raise InputError."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} cannot be read as an array of real numbers ({error}); expected a numpy array "
            "or nested lists of equal length. Convert tensors with .detach().cpu().numpy()."
        ) from error
    if array.size == 0:
        raise InputError(f"{name} is empty; expected at least one value. Check the data selection.")
    n_bad = int(np.count_nonzero(~np.isfinite(array)))
    if n_bad:
        raise InputError(
            f"{name} has {n_bad} of {array.size} values that are NaN or infinite; expected finite "
            "numbers. Find the structures they come from and fix or remove them."
        )
    return array


def positive_array(name: str, values: npt.ArrayLike) -> FloatArray:
    """Return ``values`` as a non-empty, finite, strictly positive array or raise InputError."""
    array = finite_array(name, values)
    n_bad = int(np.count_nonzero(array <= 0.0))
    if n_bad:
        raise InputError(
            f"{name} has {n_bad} of {array.size} values that are zero or negative; expected "
            "standard deviations above zero. Pass std=None for a deterministic model, or floor "
            "them at your numerical resolution, e.g. np.maximum(std, 1e-6)."
        )
    return array


def same_shape(**arrays: FloatArray) -> None:
    """Raise InputError unless all arrays have one shape (nothing is broadcast)."""
    if len({array.shape for array in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise InputError(
            f"shapes differ: {shapes}; expected one common shape, because nothing is broadcast. "
            "Reshape or repeat the arrays explicitly."
        )


def checked_pair(mean: npt.ArrayLike, target: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Validate predictions and targets."""
    mean, target = finite_array("mean", mean), finite_array("target", target)
    same_shape(mean=mean, target=target)
    return mean, target


def standardised_error(
    mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Validate a Gaussian prediction and return (z, std) with z = (target - mean) / std."""
    mean, target = checked_pair(mean, target)
    std = positive_array("std", std)
    same_shape(mean=mean, std=std, target=target)
    return (target - mean) / std, std


def checked_ranking(score: npt.ArrayLike, error: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Validate one non-negative uncertainty and one non-negative error per item, both [n]."""
    score, error = finite_array("uncertainty", score), finite_array("error", error)
    same_shape(uncertainty=score, error=error)
    if score.ndim != 1:
        raise InputError(
            f"ranking metrics got arrays of shape {score.shape}; expected one value per item, [n]. "
            "Reduce vectors first, e.g. with atom_forces or structure_forces."
        )
    if score.min() < 0.0 or error.min() < 0.0:
        raise InputError(
            "ranking metrics got negative values; expected uncertainties and errors that are not "
            "negative. Pass absolute (or squared) errors."
        )
    return score, error


def _over_components(scores: FloatArray, components: Components) -> float:
    """Average scores, either over everything or after summing the last axis of vectors."""
    if components not in ("sum", "mean"):
        raise InputError(f"components={components!r} is unknown; expected 'sum' or 'mean'.")
    if components == "sum" and scores.ndim > 1:
        scores = scores.sum(axis=-1)
    return float(scores.mean())


# ---------------------------------------------------------------------- errors and proper scores
def mse(mean: npt.ArrayLike, target: npt.ArrayLike) -> float:
    """Mean squared error over samples, particles and components."""
    mean, target = checked_pair(mean, target)
    return float(np.mean((target - mean) ** 2))


def mae(mean: npt.ArrayLike, target: npt.ArrayLike) -> float:
    """Mean absolute error over samples, particles and components."""
    mean, target = checked_pair(mean, target)
    return float(np.mean(np.abs(target - mean)))


def gaussian_nll_scores(z: FloatArray, std: FloatArray) -> FloatArray:
    """Negative log density of each target, [log(2 pi) + z^2] / 2 + log(std), in nats."""
    return 0.5 * (np.log(2.0 * np.pi) + z**2) + np.log(std)


def gaussian_nll(
    mean: npt.ArrayLike,
    std: npt.ArrayLike,
    target: npt.ArrayLike,
    components: Components = "sum",
) -> float:
    """Gaussian negative log-likelihood in nats, averaged over particles and samples.

    Args:
        mean: predictions, [S] or [N, 3].
        std: standard deviations, same shape.
        target: references, same shape.
        components: "sum" adds the components of a vector (the headline definition for forces and
            positions), "mean" averages them. One-dimensional arrays have a single component.
    """
    return _over_components(gaussian_nll_scores(*standardised_error(mean, std, target)), components)


def crps_gaussian_scores(z: FloatArray, std: FloatArray) -> FloatArray:
    """CRPS of each target: std * [z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi)], in its unit."""
    density = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    return std * (z * (2.0 * ndtr(z) - 1.0) + 2.0 * density - 1.0 / np.sqrt(np.pi))


def crps_gaussian(
    mean: npt.ArrayLike,
    std: npt.ArrayLike,
    target: npt.ArrayLike,
    components: Components = "mean",
) -> float:
    """Continuous ranked probability score of a Gaussian, closed form, in the unit of the target.

    Args:
        mean: predictions, [S] or [N, 3].
        std: standard deviations, same shape.
        target: references, same shape.
        components: "mean" averages over components, "sum" adds the components of a vector first.
    """
    return _over_components(
        crps_gaussian_scores(*standardised_error(mean, std, target)), components
    )


# ----------------------------------------------------------------------------------- calibration
def reliability_counts(z: FloatArray, groups: npt.NDArray[np.int64], n_groups: int) -> FloatArray:
    """Count, per group and level of ECE_LEVELS, the z at or below the normal quantile: [S, P]."""
    n_levels = len(ECE_LEVELS)
    first_level = np.searchsorted(ndtri(ECE_LEVELS), z, side="left")  # [n], quantile(0) = -inf
    counts = np.bincount(groups * n_levels + first_level, minlength=n_groups * n_levels)
    return np.cumsum(counts.reshape(n_groups, n_levels), axis=1).astype(np.float64)


def reliability_curve(
    mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Observed against predicted cumulative probability.

    Returns:
        (p, p_obs), both [101]: p = 0, 0.01, ..., 1, and p_obs(p) the fraction of targets at or
        below the predicted p-quantile, mean + std * Phi^-1(p). Perfect calibration is p_obs = p.
    """
    z, _ = standardised_error(mean, std, target)
    counts = reliability_counts(z.ravel(), np.zeros(z.size, dtype=np.int64), 1)[0]
    return ECE_LEVELS.copy(), counts / z.size


def ece_of_curve(p_obs: FloatArray) -> FloatArray:
    """Trapezoid of |p - p_obs(p)| over ECE_LEVELS along the last axis: [..., P] -> [...]."""
    gap = np.abs(p_obs - ECE_LEVELS)
    return np.sum(0.5 * (gap[..., 1:] + gap[..., :-1]) * np.diff(ECE_LEVELS), axis=-1)


def ece(mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike) -> float:
    """Expected calibration error, integral over p in (0, 1) of |p - p_obs(p)|.

    See reliability_curve for p_obs and its fixed grid. 0 is perfect, 0.25 the value of a sigma that
    is far too large, and nothing exceeds 0.5 (all targets on one side, far outside).
    """
    return float(ece_of_curve(reliability_curve(mean, std, target)[1]))


def zms(mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike) -> float:
    """Mean squared standardised error, mean(z^2); 1 if calibrated, above 1 if overconfident."""
    z, _ = standardised_error(mean, std, target)
    return float(np.mean(z**2))


def coverage(
    mean: npt.ArrayLike,
    std: npt.ArrayLike,
    target: npt.ArrayLike,
    levels: Sequence[float] = COVERAGE_LEVELS,
) -> FloatArray:
    """Fraction of targets inside the central Gaussian interval of each nominal level, [levels].

    A target is covered at level c if |z| <= Phi^-1((1 + c) / 2).
    """
    z, _ = standardised_error(mean, std, target)
    wanted = finite_array("levels", levels)
    if wanted.min() <= 0.0 or wanted.max() >= 1.0:
        raise InputError(f"levels are {levels}; expected probabilities above 0 and below 1.")
    return np.array([np.mean(np.abs(z) <= ndtri(0.5 * (1.0 + level))) for level in wanted])


def tie_averaged(sorted_key: FloatArray, values: FloatArray) -> FloatArray:
    """Replace values by their mean over equal keys: the expectation over random tie-breaking."""
    starts = np.flatnonzero(np.diff(sorted_key, prepend=-np.inf) > 0.0)
    if len(starts) == len(sorted_key):
        return values
    counts = np.diff(starts, append=len(sorted_key))
    return np.repeat(np.add.reduceat(values, starts) / counts, counts)


def binned_errors(
    mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike, n_bins: int = 10
) -> tuple[FloatArray, FloatArray]:
    """Root-mean-square sigma and error in bins of equal count, ordered by sigma.

    Equal sigmas share their mean squared error, so the order of the data never matters.

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
    """Expected normalised calibration error, mean over bins of |RMS sigma - RMSE| / RMS sigma.

    Bins are those of binned_errors. Depends on n_bins, and is above 0 for finite bins even if
    calibrated (about sqrt(n_bins / (pi n))); compare it only at equal n and n_bins.
    """
    rms_std, rmse = binned_errors(mean, std, target, n_bins)
    return float(np.mean(np.abs(rms_std - rmse) / rms_std))


# --------------------------------------------------------------------------------------- ranking
def spearman(variance: npt.ArrayLike, squared_error: npt.ArrayLike) -> float:
    """Spearman's rank correlation (scipy.stats.spearmanr) of variance and squared error, [n] each.

    Ranks do not change under the square root, so sigma and error norm give the same number.
    Returns 0 where the correlation is undefined because either array is constant.
    """
    variance, squared_error = checked_ranking(variance, squared_error)
    if len(variance) < 2:
        raise InputError("a rank correlation got one item; expected at least two. Add data.")
    if np.ptp(variance) == 0.0 or np.ptp(squared_error) == 0.0:
        return 0.0
    return float(np.asarray(spearmanr(variance, squared_error))[0])


def auroc(uncertainty: npt.ArrayLike, error: npt.ArrayLike, threshold: float) -> float:
    """Area under the ROC curve for finding "error above threshold" by a large uncertainty.

    The probability that a random item with error > threshold has a larger uncertainty than a random
    item with error <= threshold; equal uncertainties count one half (Mann-Whitney U). Returns 0.5,
    the value of guessing, if either class is empty.
    """
    uncertainty, error = checked_ranking(uncertainty, error)
    if not np.isfinite(threshold):
        raise InputError(f"threshold is {threshold}; expected a finite error in the data's unit.")
    event = error > threshold
    n_event, n_rest = int(event.sum()), int((~event).sum())
    if n_event == 0 or n_rest == 0:
        return 0.5
    order = np.argsort(uncertainty, kind="stable")
    midrank = tie_averaged(uncertainty[order], np.arange(1.0, len(order) + 1.0))
    rank_sum = midrank[event[order]].sum()
    return float((rank_sum - 0.5 * n_event * (n_event + 1)) / (n_event * n_rest))


@dataclass(frozen=True)
class RejectionCurve:
    """Error that remains after the most uncertain items are dropped.

    With n items, R(k/n) is the mean error of the n - k items of least uncertainty, k = 0..n-1.

    Attributes:
        fraction: dropped fraction k/n, [n].
        error: R, the mean error that remains, [n].
        oracle: the same when the items of largest error are dropped first, [n].
        random: expected R when dropping at random, at every fraction: the mean error.
        auc: mean of ``error`` over k; the expected area under random dropping is ``random``.
        auc_normalised: (auc - oracle auc) / (random - oracle auc): 0 oracle, 1 random, above 1
            worse than random. It is 1 if all errors are equal, when no order helps.
    """

    fraction: FloatArray
    error: FloatArray
    oracle: FloatArray
    random: float
    auc: float
    auc_normalised: float


def rejection_curve(uncertainty: npt.ArrayLike, error: npt.ArrayLike) -> RejectionCurve:
    """Compute the error-rejection curve of non-negative errors [n] by uncertainties [n].

    Equal uncertainties are dropped in random order (their expected error is used), so a constant
    uncertainty gives exactly the random curve.
    """
    uncertainty, error = checked_ranking(uncertainty, error)
    n = len(error)
    order = np.argsort(uncertainty, kind="stable")
    kept = np.arange(1, n + 1)  # [n] items kept, from the most certain one to all
    by_uncertainty = np.cumsum(tie_averaged(uncertainty[order], error[order])) / kept
    by_error = np.cumsum(np.sort(error)) / kept
    random = float(error.mean())
    auc, oracle_auc = float(by_uncertainty.mean()), float(by_error.mean())
    spread = random - oracle_auc
    normalised = (auc - oracle_auc) / spread if np.ptp(error) > 0.0 and spread > 0.0 else 1.0
    return RejectionCurve(
        np.arange(n) / n, by_uncertainty[::-1], by_error[::-1], random, auc, normalised
    )


# ------------------------------------------------------------------ forces per atom and structure
class AtomForces(NamedTuple):
    """Per-atom reductions of force predictions, each [N]."""

    variance: FloatArray
    """Summed component variances, (eV/A)^2."""
    squared_error: FloatArray
    """Squared norm of the force error, (eV/A)^2."""


class StructureForces(NamedTuple):
    """Per-structure reductions of force predictions, each [S].

    The mean force VECTOR of a structure is the net force, which is zero for every conservative
    model whatever its quality; therefore norms are averaged instead. ``norm_std`` has the scale of
    one atom's force error. It ranks structures, but is larger than the spread of an average over
    many atoms with independent errors: even an ideal model has an ECE above 0 at this level.
    """

    norm: FloatArray
    """Atom-mean of the predicted force norms, eV/A."""
    norm_std: FloatArray
    """Root of the atom-mean of the summed component variances, eV/A."""
    norm_ref: FloatArray
    """Atom-mean of the reference force norms, eV/A."""
    squared_error: FloatArray
    """Atom-mean of the squared norms of the force errors, (eV/A)^2."""


def checked_counts(n_atoms: npt.ArrayLike, n_rows: int | None = None) -> npt.NDArray[np.int64]:
    """Validate numbers of atoms per structure [S], which must add up to ``n_rows`` if given."""
    counts = finite_array("n_atoms", n_atoms)
    if counts.ndim != 1 or np.any(counts < 1) or np.any(counts != np.round(counts)):
        raise InputError(
            "n_atoms must hold one positive whole number per structure, [S]; drop structures "
            "without atoms and pass a flat list."
        )
    if n_rows is not None and int(counts.sum()) != n_rows:
        raise InputError(
            f"n_atoms adds up to {int(counts.sum())} atoms but the forces have {n_rows} rows; "
            "expected one row per atom, structures one after the other. Check their order."
        )
    return counts.astype(np.int64)


def _checked_vectors(
    forces: npt.ArrayLike, forces_std: npt.ArrayLike, forces_ref: npt.ArrayLike
) -> tuple[FloatArray, FloatArray, FloatArray]:
    forces, forces_ref = finite_array("forces", forces), finite_array("forces_ref", forces_ref)
    forces_std = positive_array("forces_std", forces_std)
    same_shape(forces=forces, forces_std=forces_std, forces_ref=forces_ref)
    if forces.ndim != 2:
        raise InputError(f"forces have shape {forces.shape}; expected [N, 3], one row per atom.")
    return forces, forces_std, forces_ref


def atom_forces(
    forces: npt.ArrayLike, forces_std: npt.ArrayLike, forces_ref: npt.ArrayLike
) -> AtomForces:
    """Reduce force components [N, 3] to one variance and one squared error norm per atom."""
    forces, forces_std, forces_ref = _checked_vectors(forces, forces_std, forces_ref)
    squared_error = np.sum((forces_ref - forces) ** 2, axis=1)
    return AtomForces(np.sum(forces_std**2, axis=1), squared_error)


def structure_forces(
    forces: npt.ArrayLike,
    forces_std: npt.ArrayLike,
    forces_ref: npt.ArrayLike,
    n_atoms: npt.ArrayLike,
) -> StructureForces:
    """Reduce force components [N, 3] to per-structure norms, sigma and squared errors, [S]."""
    forces, forces_std, forces_ref = _checked_vectors(forces, forces_std, forces_ref)
    counts = checked_counts(n_atoms, len(forces))
    starts = np.cumsum(counts) - counts

    def atom_mean(per_atom: FloatArray) -> FloatArray:  # [N] -> [S]
        return np.add.reduceat(per_atom, starts) / counts

    variance, squared_error = atom_forces(forces, forces_std, forces_ref)
    return StructureForces(
        norm=atom_mean(np.linalg.norm(forces, axis=1)),
        norm_std=np.sqrt(atom_mean(variance)),
        norm_ref=atom_mean(np.linalg.norm(forces_ref, axis=1)),
        squared_error=atom_mean(squared_error),
    )
