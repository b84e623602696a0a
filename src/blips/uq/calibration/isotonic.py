"""A monotone map of sigma, fitted by pooling adjacent violators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from blips.errors import InputError
from blips.uq.calibration.saved import saved_entry
from blips.uq.checks import (
    FloatArray,
    non_negative_array,
    positive_array,
    same_shape,
    standardised_error,
)
from blips.uq.ranking import tie_averaged


@dataclass(frozen=True)
class IsotonicCalibrator:
    """Replace sigma by a monotone function of itself that matches the observed error size.

    Held-out points are ordered by std^2 and averaged in bins of equal count, at least ``min_count``
    points and at most 100 bins; a non-decreasing least-squares fit (pool adjacent violators) of
    the mean squared error on the mean variance gives knots. Between knots log sigma is linear in
    log std; beyond them the last ratio sigma/std is kept. The map is therefore continuous, strictly
    increasing (Spearman's rho and AUROC do not change), zero at zero alone, and consistent under a
    change of units. The variance of a knot is the mean squared error of the points pooled in it, an
    estimate whose relative error is sqrt(2 / count) for independent Gaussian errors. There is no
    finite-sample guarantee of coverage.

    Attributes:
        std_in: model's sigma at the knots, ascending, [knots].
        std_out: recalibrated sigma at the knots, ascending, [knots].
    """

    kind: ClassVar[str] = "isotonic"
    max_bins: ClassVar[int] = 100
    std_in: tuple[float, ...]
    std_out: tuple[float, ...]

    def __post_init__(self) -> None:
        std_in, std_out = (
            positive_array("std_in", self.std_in),
            positive_array("std_out", self.std_out),
        )
        same_shape(std_in=std_in, std_out=std_out)
        if np.any(np.diff(std_in) <= 0.0) or np.any(np.diff(std_out) < 0.0):
            raise InputError(
                "the knots of an isotonic calibrator do not ascend; expected the output of fit. "
                "Fit it again on held-out data."
            )

    @classmethod
    def fit(
        cls,
        mean: npt.ArrayLike,
        std: npt.ArrayLike,
        target: npt.ArrayLike,
        min_count: int = 50,
    ) -> Self:
        """Fit the map on held-out data of at least ``min_count`` scalars, in bins of that size."""
        z, std = standardised_error(mean, std, target)
        if min_count < 1 or std.size < min_count:
            raise InputError(
                f"isotonic recalibration got {std.size} values with min_count={min_count}; "
                "expected min_count of at least 1 and no fewer values. Use ScaleCalibrator or "
                "more held-out data."
            )
        order = np.argsort(std, axis=None, kind="stable")
        variance = std.ravel()[order] ** 2
        squared_error = tie_averaged(variance, z.ravel()[order] ** 2 * variance)
        n_bins = min(std.size // min_count, cls.max_bins)
        starts = np.arange(n_bins) * std.size // n_bins
        counts = np.diff(starts, append=std.size).astype(np.float64)
        x = np.add.reduceat(variance, starts) / counts
        y = np.add.reduceat(squared_error, starts) / counts
        return cls._from_blocks(*isotonic_blocks(*_merge_ties(x, y, counts)))

    @classmethod
    def _from_blocks(cls, x: FloatArray, y: FloatArray, weight: FloatArray) -> Self:
        """Make knots of blocks; a first block without any error joins the second."""
        if y[-1] <= 0.0:
            raise InputError(
                "all held-out errors are zero; expected errors to calibrate against. Use data "
                "that the model was not fitted to."
            )
        if y[0] <= 0.0:
            head = weight[:2] / weight[:2].sum()
            x = np.concatenate([[head @ x[:2]], x[2:]])
            y = np.concatenate([[head @ y[:2]], y[2:]])
        return cls(std_in=tuple(np.sqrt(x).tolist()), std_out=tuple(np.sqrt(y).tolist()))

    def apply(self, std: npt.ArrayLike) -> FloatArray:
        """Return the recalibrated standard deviations, in the unit and shape of ``std``."""
        std = non_negative_array("std", std)
        knots = np.log(np.array(self.std_in))
        log_ratio = np.log(np.array(self.std_out)) - knots
        # Below the first knot the ratio is constant, so that zero needs no logarithm.
        log_std = np.log(np.maximum(std, self.std_in[0]))
        return std * np.exp(np.interp(log_std, knots, log_ratio))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description."""
        return {"kind": self.kind, "std_in": list(self.std_in), "std_out": list(self.std_out)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Restore what to_dict returned."""
        std_in = saved_entry(cls.kind, saved, "std_in")
        std_out = saved_entry(cls.kind, saved, "std_out")
        return cls(std_in=tuple(map(float, std_in)), std_out=tuple(map(float, std_out)))


def isotonic_blocks(
    x: FloatArray, y: FloatArray, weight: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Least-squares non-decreasing fit of y by pooling adjacent violators.

    Minimises sum weight * (f - y)^2 over non-decreasing f. Neighbours whose means do not increase
    are pooled until all means increase strictly.

    Args:
        x: abscissae in ascending order, [n].
        y: values to fit, [n].
        weight: positive weights, [n].

    Returns:
        Weighted means of x and of y, and the weight, of every pooled block; both means increase.
    """
    blocks: list[tuple[float, float, float]] = []  # x mean, y mean, weight
    for x_new, y_new, w_new in zip(x, y, weight, strict=True):
        block = (float(x_new), float(y_new), float(w_new))
        while blocks and blocks[-1][1] >= block[1]:
            x_old, y_old, w_old = blocks.pop()
            total = w_old + block[2]
            block = (
                (w_old * x_old + block[2] * block[0]) / total,
                (w_old * y_old + block[2] * block[1]) / total,
                total,
            )
        blocks.append(block)
    columns = np.array(blocks)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _merge_ties(
    x: FloatArray, y: FloatArray, weight: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Average neighbouring bins of equal abscissa (a sigma shared by many points)."""
    starts = np.flatnonzero(np.diff(x, prepend=-np.inf) > 1e-12 * x)
    total = np.add.reduceat(weight, starts)
    return x[starts], np.add.reduceat(weight * y, starts) / total, total
