"""Percentile bootstrap confidence intervals, resampling whole structures.

Errors of atoms in one structure are correlated, so the unit drawn with replacement is the group
(structure), never the single component. A resample is a vector of counts: how often each group
occurs. For a given seed and number of groups the counts are the same for every metric, so intervals
of different metrics, and differences between models, refer to the same resamples.

The interval takes the 2.5 and 97.5 percentiles of the resampled metric. It describes the choice of
test structures alone, not the randomness of training. Metrics built from absolute
differences (ECE, ENCE) are larger on average on resamples than on the data; for a nearly calibrated
model their interval can lie wholly above the value.

Letters in shape comments: n rows, S groups, B resamples, P scores, M metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from blips.errors import refuse_below
from blips.uq.checks import FloatArray, IntArray

Transform = Callable[[FloatArray], FloatArray]

LEVEL = 0.95  # of confidence
_CHUNK_ELEMENTS = 2**21


@dataclass(frozen=True)
class Interval:
    """Hold a metric's value with its confidence interval, None without bootstrap."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True)
class Bootstrap:
    """Compute metrics with intervals over resamples of S groups."""

    n_groups: int  # S
    n_resamples: int = 1000  # B; 0 gives values without intervals
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_below(0, n_resamples=self.n_resamples)

    @property
    def active(self) -> bool:
        """Whether there are intervals at all; a single structure cannot be resampled."""
        return self.n_resamples > 0 and self.n_groups > 1

    def counts(self) -> Iterator[FloatArray]:
        """Yield how often each group occurs in each resample, in chunks [b, S], B rows in all.

        Each row is a draw of S groups out of S with replacement and adds up to S. There are none
        where there are no intervals.
        """
        rng = np.random.default_rng(self.seed)
        chunk = max(1, _CHUNK_ELEMENTS // self.n_groups)
        for start in range(0, self.n_resamples if self.active else 0, chunk):
            rows = min(chunk, self.n_resamples - start)
            drawn = rng.integers(self.n_groups, size=(rows, self.n_groups))  # [b, S]
            drawn += np.arange(rows)[:, None] * self.n_groups
            counts = np.bincount(drawn.ravel(), minlength=rows * self.n_groups)
            yield counts.reshape(rows, self.n_groups).astype(np.float64)

    def of(
        self,
        metric: Callable[..., float | FloatArray],
        *arrays: npt.NDArray[Any],
        groups: IntArray,
    ) -> list[Interval]:
        """Compute one or several metrics of arrays whose rows belong to groups.

        Each resample is ``metric(*[array[rows] for array in arrays])``, a float or an array [M],
        with rows repeated as often as their group (0 to S - 1, [n]) was drawn, in ascending order:
        presort the data if the metric sorts. Resamples that yield NaN are left out. Compare two
        models on the same resamples with a metric of both.
        """
        rows, resampled = np.arange(len(groups)), list[FloatArray]()
        for chunk in self.counts():
            for counts in chunk.astype(np.int64):
                chosen = np.repeat(rows, counts[groups])
                resampled.append(np.atleast_1d(metric(*(array[chosen] for array in arrays))))
        return _intervals(np.atleast_1d(metric(*arrays)), resampled)

    def of_sums(
        self, sums: FloatArray, groups: IntArray, transform: Transform = lambda means: means
    ) -> list[Interval]:
        """Compute means of scores over rows in groups [n], or functions of those means.

        With the sums of the scores over each group [S, P], a resample with counts c [S] is
        (c @ sums) / (c @ sizes): exactly equal to `of`, and much faster. `transform` maps means
        [..., P] to metrics [..., M].
        """
        sizes = np.bincount(groups, minlength=self.n_groups).astype(np.float64)
        resampled: list[FloatArray] = []
        for counts in self.counts():
            totals = (counts @ sizes)[:, None]
            means = np.full((len(counts), sums.shape[1]), np.nan)
            np.divide(counts @ sums, totals, out=means, where=totals > 0)
            resampled.extend(transform(means))
        return _intervals(transform(sums.sum(axis=0) / sizes.sum()), resampled)


def _intervals(values: FloatArray, resampled: list[FloatArray]) -> list[Interval]:
    """Take the intervals between equal tails of resampled values, B of [M], leaving out NaN."""
    samples = np.array(resampled).reshape(-1, len(values))  # [B, M]
    intervals = []
    for value, column in zip(values.tolist(), samples.T, strict=True):
        usable = column[~np.isnan(column)]
        tails = np.percentile(usable, [50 * (1 - LEVEL), 50 * (1 + LEVEL)]) if len(usable) else ()
        intervals.append(Interval(value, *map(float, tails)))
    return intervals
