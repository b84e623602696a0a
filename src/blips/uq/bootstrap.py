"""Percentile bootstrap confidence intervals, resampling whole structures.

Errors of atoms in one structure are correlated, so the unit that is drawn with replacement is the
group (structure), never the single component. A resample is a vector of counts: how often each
group occurs. For a given seed and number of groups the counts are the same for every metric, so
intervals of different metrics, and differences between models, refer to the same resamples.

The interval takes the alpha/2 and 1 - alpha/2 percentiles of the resampled metric. It describes the
choice of test structures alone, not the randomness of training. Metrics built from absolute
deviations (ECE, ENCE) are larger on average on resamples than on the data; for a nearly calibrated
model their interval can lie wholly above the value.

Letters in shape comments: n rows, S groups, B resamples, M metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blips.errors import InputError
from blips.uq.checks import FloatArray, finite_array

Metric = Callable[..., "float | FloatArray"]

_CHUNK_ELEMENTS = 2**21


@dataclass(frozen=True)
class Interval:
    """A metric's value with its confidence interval.

    Attributes:
        value: the metric on the data as given.
        low: lower end of the interval, None without bootstrap.
        high: upper end of the interval, None without bootstrap.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        """Give the value, with the interval in brackets if there is one."""
        if self.low is None or self.high is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def resample_counts(n_groups: int, n_bootstrap: int, seed: int) -> Iterator[FloatArray]:
    """Yield the counts of every group in each resample, in chunks [b, S] that make B rows in all.

    Each row is a draw of S groups out of S with replacement and adds up to S.
    """
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK_ELEMENTS // n_groups)
    for start in range(0, n_bootstrap, chunk):
        rows = min(chunk, n_bootstrap - start)
        drawn = rng.integers(n_groups, size=(rows, n_groups))  # [b, S]
        drawn += np.arange(rows)[:, None] * n_groups
        counts = np.bincount(drawn.ravel(), minlength=rows * n_groups)
        yield counts.reshape(rows, n_groups).astype(np.float64)


def percentile_interval(values: FloatArray, resampled: FloatArray, level: float) -> list[Interval]:
    """Turn values [M] and their resamples [B, M] into intervals; NaN resamples are left out."""
    if not 0.0 < level < 1.0:
        raise InputError(f"level={level}; expected a confidence level between 0 and 1, as 0.95.")
    tails = [50.0 * (1.0 - level), 50.0 * (1.0 + level)]
    intervals: list[Interval] = []
    for value, column in zip(values, resampled.T, strict=True):
        usable = column[~np.isnan(column)]
        low, high = np.percentile(usable, tails) if len(usable) else (None, None)
        bounds = (None, None) if low is None or high is None else (float(low), float(high))
        intervals.append(Interval(float(value), *bounds))
    return intervals


def _checked_resampling(n_groups: int, n_bootstrap: int) -> None:
    if n_groups < 2:
        raise InputError(
            f"the bootstrap got {n_groups} group; expected at least two structures to resample. "
            "Evaluate more structures, or report the value without an interval."
        )
    if n_bootstrap < 1:
        raise InputError(f"n_bootstrap={n_bootstrap}; expected 1 or more, usually 1000.")


def _group_index(groups: npt.ArrayLike | None, n_rows: int) -> tuple[npt.NDArray[np.int64], int]:
    """Number the groups 0..S-1 and return the number of every row [n], and S."""
    if groups is None:
        return np.arange(n_rows), n_rows
    labels = np.asarray(groups)
    if labels.shape != (n_rows,):
        raise InputError(
            f"groups have shape {labels.shape} for {n_rows} rows; expected one label per row of "
            "the data, e.g. np.repeat(np.arange(len(n_atoms)), n_atoms)."
        )
    unique, index = np.unique(labels, return_inverse=True)
    return index.reshape(-1).astype(np.int64), len(unique)


def bootstrap_intervals(
    metric: Metric,
    *arrays: npt.ArrayLike,
    groups: npt.ArrayLike | None = None,
    n_bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> list[Interval]:
    """Intervals of a function that returns one or several metrics of its arrays.

    Each resample is ``metric(*[array[rows] for array in arrays])`` with rows repeated as often as
    their group was drawn, in ascending order: presort the data by sigma if the metric sorts.

    Args:
        metric: maps the arrays to a float or to an array [M].
        *arrays: data with a common first axis, [n, ...].
        groups: label of the structure of each row, [n]; None makes every row its own group.
        n_bootstrap: number of resamples B.
        level: confidence level of the interval.
        seed: seed of the resampling.

    Returns:
        One Interval per metric, [M]. A resample that yields NaN is left out of the percentiles.
    """
    if not arrays:
        raise InputError("the bootstrap got no data; pass the arrays that the metric takes.")
    data = [np.asarray(array) for array in arrays]
    if any(array.ndim == 0 or len(array) != len(data[0]) for array in data) or not len(data[0]):
        raise InputError(
            f"the arrays have shapes {[array.shape for array in data]}; expected a common, "
            "non-empty first axis, over which rows are resampled."
        )
    index, n_groups = _group_index(groups, len(data[0]))
    _checked_resampling(n_groups, n_bootstrap)
    rows = np.arange(len(index))
    resampled: list[FloatArray] = []
    for chunk in resample_counts(n_groups, n_bootstrap, seed):
        for counts in chunk.astype(np.int64):
            chosen = np.repeat(rows, counts[index])
            resampled.append(np.atleast_1d(metric(*(array[chosen] for array in data))))
    values = np.atleast_1d(np.asarray(metric(*data), dtype=np.float64))
    return percentile_interval(values, np.stack(resampled), level)


def bootstrap_interval(
    metric: Metric,
    *arrays: npt.ArrayLike,
    groups: npt.ArrayLike | None = None,
    n_bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Interval of a single metric; see bootstrap_intervals for the arguments.

    Compare two models on the same resamples with a metric of both, for example
    ``lambda a, b, target: mae(a, target) - mae(b, target)``.
    """
    intervals = bootstrap_intervals(
        metric, *arrays, groups=groups, n_bootstrap=n_bootstrap, level=level, seed=seed
    )
    if len(intervals) != 1:
        raise InputError(
            f"the metric returned {len(intervals)} values; expected one. Use bootstrap_intervals."
        )
    return intervals[0]


def bootstrap_means(
    group_sums: npt.ArrayLike,
    group_sizes: npt.ArrayLike,
    transform: Callable[[FloatArray], FloatArray] | None = None,
    *,
    n_bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> list[Interval]:
    """Intervals of means of scores, or of a function of such means, by matrix products.

    Means over rows are ratios of sums over groups, so that a resample with counts c [S] is
    (c @ group_sums) / (c @ group_sizes). Exactly equal to bootstrap_intervals, and much faster.

    Args:
        group_sums: sums of each score over the rows of each group, [S, P].
        group_sizes: number of rows of each group, [S]; zero where a group has none.
        transform: maps means [..., P] to metrics [..., M]; None keeps the means (M = P).
        n_bootstrap: number of resamples B.
        level: confidence level of the interval.
        seed: seed of the resampling.
    """
    sums, sizes = finite_array("group_sums", group_sums), finite_array("group_sizes", group_sizes)
    if sums.ndim != 2 or sizes.shape != sums.shape[:1] or sizes.sum() <= 0:
        raise InputError(
            f"group_sums have shape {sums.shape} and group_sizes {sizes.shape}; expected [S, P] "
            "and [S] with at least one row in all."
        )
    _checked_resampling(len(sums), n_bootstrap)
    keep = transform or (lambda means: means)
    resampled: list[FloatArray] = []
    for counts in resample_counts(len(sums), n_bootstrap, seed):  # [b, S]
        totals = (counts @ sizes)[:, None]
        means = np.full((len(counts), sums.shape[1]), np.nan)
        np.divide(counts @ sums, totals, out=means, where=totals > 0)
        resampled.append(keep(means))
    return percentile_interval(
        keep(sums.sum(axis=0) / sizes.sum()), np.concatenate(resampled), level
    )
