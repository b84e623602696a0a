"""Measure how well standard deviations order the errors: rank correlation, detection, rejection.

These metrics look at the order of the standard deviations alone, so no recalibration by an
increasing map changes them. All take one non-negative score and one non-negative error per item,
[n], and treat equal scores as if their order were random.

Letters in shape comments: N atoms, S structures, n items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blips.errors import InputError
from blips.uq.checks import FloatArray, IntArray, checked_counts, checked_ranking, checked_vectors


class ForceItems(NamedTuple):
    """Forces reduced to one row per item (atom or structure), each [n].

    Over a structure, norms and squares are averaged over its atoms. (The mean force VECTOR is the
    net force, zero for every conservative model whatever its quality.) There ``std`` has the scale
    of one atom's force error: it ranks structures, but exceeds the standard deviation of an average
    over many atoms with independent errors, so even an ideal model has an ECE above 0.
    """

    norm: FloatArray
    """Predicted force norm, eV/A."""
    norm_ref: FloatArray
    """Reference force norm, eV/A."""
    std: FloatArray
    """Root of the summed variances of the components, eV/A."""
    error: FloatArray
    """Root of the squared norm of the force error, eV/A."""


def force_items(
    forces: npt.ArrayLike,
    forces_std: npt.ArrayLike,
    forces_ref: npt.ArrayLike,
    n_atoms: npt.ArrayLike | None = None,
) -> ForceItems:
    """Reduce force components [N, 3] to items per atom [N], or per structure [S] with n_atoms."""
    forces, forces_std, forces_ref = checked_vectors(forces, forces_std, forces_ref)
    counts = np.ones(len(forces)) if n_atoms is None else checked_counts(n_atoms, len(forces))
    starts = (np.cumsum(counts) - counts).astype(np.int64)

    def atom_mean(per_atom: FloatArray) -> FloatArray:  # [N] -> [n]
        return np.add.reduceat(per_atom, starts) / counts

    return ForceItems(
        norm=atom_mean(np.linalg.norm(forces, axis=1)),
        norm_ref=atom_mean(np.linalg.norm(forces_ref, axis=1)),
        std=np.sqrt(atom_mean(np.sum(forces_std**2, axis=1))),
        error=np.sqrt(atom_mean(np.sum((forces_ref - forces) ** 2, axis=1))),
    )


def tie_averaged(sorted_key: FloatArray, values: FloatArray) -> FloatArray:
    """Replace values by their mean over equal keys: the expectation over random tie-breaking."""
    starts = np.flatnonzero(np.diff(sorted_key, prepend=-np.inf) > 0.0)
    if len(starts) == len(sorted_key):
        return values
    counts = np.diff(starts, append=len(sorted_key))
    return np.repeat(np.add.reduceat(values, starts) / counts, counts)


def dense_ranks(values: FloatArray) -> IntArray:
    """Number the distinct values in ascending order, 0, 1, ...; equal values share a number."""
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


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
    """Give the mean position (from 1) among equal items, minus the mean of all, (n + 1)/2."""
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


def spearman(std: npt.ArrayLike, error: npt.ArrayLike, given: npt.ArrayLike | None = None) -> float:
    """Compute Spearman's rank correlation of std and error, [n] each, ties sharing ranks.

    Ranks do not change under the square, so variances and squared errors give the same number.

    Args:
        std: standard deviations, or any other score.
        error: absolute errors.
        given: a third quantity [n]; the result is then the partial rank correlation, which says
            what ``std`` adds to ranking by ``given``, for example the predicted force norm.

    Returns:
        rho; 0 where it is undefined because an array is constant.
    """
    std, error = checked_ranking(std, error)
    if len(std) < 2:
        raise InputError("a rank correlation got one item; expected at least two. Add data.")
    ranks = dense_ranks(std), dense_ranks(error)
    rho = rank_correlation(*ranks)
    if given is None:
        return rho
    third = dense_ranks(checked_ranking(given, error)[0])
    return partial_correlation(rho, *(rank_correlation(rank, third) for rank in ranks))


def auroc(std: npt.ArrayLike, error: npt.ArrayLike, threshold: float) -> float:
    """Compute the area under the ROC curve for detecting large errors by standard deviation.

    The probability that a random item with error > threshold has a larger std than a random item
    with error <= threshold; equal stds count one half (Mann-Whitney U). Returns 0.5, the value of
    guessing, if either class is empty.
    """
    std, error = checked_ranking(std, error)
    if not np.isfinite(threshold):
        raise InputError(f"threshold is {threshold}; expected a finite error in the data's unit.")
    event = error > threshold
    n_event, n_rest = int(event.sum()), int((~event).sum())
    if n_event == 0 or n_rest == 0:
        return 0.5
    order = np.argsort(std, kind="stable")
    midrank = tie_averaged(std[order], np.arange(1.0, len(order) + 1.0))
    rank_sum = midrank[event[order]].sum()
    return float((rank_sum - 0.5 * n_event * (n_event + 1)) / (n_event * n_rest))


@dataclass(frozen=True)
class RejectionCurve:
    """Hold the error that remains after the items of largest std are dropped.

    With n items, R(k/n) is the mean error of the n - k items of least std, k = 0..n-1.

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


def rejection_curve(std: npt.ArrayLike, error: npt.ArrayLike) -> RejectionCurve:
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
