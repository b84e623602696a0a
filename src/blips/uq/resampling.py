"""Intervals of one evaluation: the same resamples of structures for every metric.

Letters in shape comments: n rows, S structures, P scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from blips.uq.bootstrap import Interval, bootstrap_intervals, bootstrap_means
from blips.uq.checks import FloatArray, IntArray

Transform = Callable[[FloatArray], FloatArray] | None


@dataclass(frozen=True)
class Resampling:
    """How intervals are made, and what had to be left out for lack of data.

    Attributes:
        n_structures: number of structures S, the groups that are resampled.
        n_bootstrap: number of resamples; 0 for values without intervals.
        level: confidence level of the intervals.
        seed: seed of the resampling.
        omitted: grows by one note per metric that was left out.
    """

    n_structures: int
    n_bootstrap: int
    level: float
    seed: int
    omitted: list[str] = field(default_factory=list)

    @property
    def active(self) -> bool:
        """Whether there are intervals at all; a single structure cannot be resampled."""
        return self.n_bootstrap > 0 and self.n_structures > 1

    def of_means(
        self, scores: FloatArray, groups: IntArray, transform: Transform = None
    ) -> list[Interval]:
        """Intervals of functions of the means of scores [n, P] over rows in groups [n]."""
        sizes = np.bincount(groups, minlength=self.n_structures).astype(np.float64)
        sums = np.zeros((self.n_structures, scores.shape[1]))
        for column, score in enumerate(scores.T):
            sums[:, column] = np.bincount(groups, score, minlength=self.n_structures)
        return self.of_group_sums(sums, sizes, transform)

    def of_group_sums(
        self, sums: FloatArray, sizes: FloatArray, transform: Transform = None
    ) -> list[Interval]:
        """Intervals of functions of means, from sums [S, P] and numbers of rows [S] per group."""
        if not self.active:
            means = sums.sum(axis=0) / sizes.sum()
            values = means if transform is None else transform(means)
            return [Interval(float(value)) for value in values]
        return bootstrap_means(
            sums,
            sizes,
            transform,
            n_bootstrap=self.n_bootstrap,
            level=self.level,
            seed=self.seed,
        )

    def of_sorting(
        self,
        function: Callable[..., FloatArray],
        sort_key: FloatArray,
        *arrays: npt.NDArray[Any],
        groups: IntArray,
    ) -> list[Interval]:
        """Intervals of a function that sorts; presorted rows make each resample's sort cheap."""
        order = np.argsort(sort_key, kind="stable")
        arrays = tuple(array[order] for array in arrays)
        if not self.active:
            return [Interval(float(value)) for value in function(*arrays)]
        return bootstrap_intervals(
            function,
            *arrays,
            groups=groups[order],
            n_bootstrap=self.n_bootstrap,
            level=self.level,
            seed=self.seed,
        )
