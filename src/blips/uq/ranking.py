"""How well uncertainties order the errors: rank correlation, detection, rejection.

These metrics look at the order of the uncertainties alone, so no recalibration by an increasing
map changes them. All take one non-negative uncertainty and one non-negative error per item, [n],
and treat equal uncertainties as if their order were random.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blips.errors import InputError
from blips.uq.checks import FloatArray, IntArray, checked_ranking


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
    """Spearman's rho of items given by dense ranks, [n] each, without sorting.

    Pearson's correlation of mid-ranks, where equal items share the mean of their positions. Any
    selection of rows of dense_ranks will do, with gaps and repeats, so that a bootstrap sorts once
    and every resample costs O(n). 0 if either array is constant, where rho is undefined.
    """
    a, b = _centred_midranks(first), _centred_midranks(second)
    scale = np.sqrt((a @ a) * (b @ b))
    return float(np.clip(a @ b / scale, -1.0, 1.0)) if scale > 0.0 else 0.0


def _centred_midranks(dense: IntArray) -> FloatArray:
    """Mean position (from 1) among equal items, minus the mean of all positions, (n + 1)/2."""
    counts = np.bincount(dense)
    return (np.cumsum(counts) - 0.5 * (counts - 1))[dense] - 0.5 * (len(dense) + 1)


def spearman(variance: npt.ArrayLike, squared_error: npt.ArrayLike) -> float:
    """Spearman's rank correlation of variance and squared error, [n] each, ties sharing ranks.

    Ranks do not change under the square root, so sigma and error norm give the same number.
    Returns 0 where the correlation is undefined because either array is constant.
    """
    variance, squared_error = checked_ranking(variance, squared_error)
    if len(variance) < 2:
        raise InputError("a rank correlation got one item; expected at least two. Add data.")
    return rank_correlation(dense_ranks(variance), dense_ranks(squared_error))


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
