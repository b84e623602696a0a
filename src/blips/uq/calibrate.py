"""Recalibrate predicted standard deviations on held-out data.

Three calibrators with the same verbs, in the order of how much they correct:

| class | what it learns | what it promises |
|---|---|---|
| ScaleCalibrator | one factor on std | least Gaussian NLL of all constant factors |
| IsotonicCalibrator | a monotone map of std | locally right error size, ranking unchanged |
| ConformalCalibrator | quantiles of abs(error)/std | finite-sample coverage of intervals |

The class method ``fit(mean, std, target)`` returns a fitted, immutable calibrator, ``apply(std)``
gives the recalibrated standard deviations in the same unit and shape, ``to_dict`` and
``calibrator_from_dict`` go through JSON. Fit on data that neither trained the model nor tests it,
and fit energies and forces separately; arrays of any shape are taken as one pool of scalars. A std
of zero, where symmetry makes a model certain, stays zero in ``apply``; ``fit`` needs stds above
zero. No promise survives a change of distribution: what was fitted in-distribution says nothing
certain about structures of a new kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression

from blips.errors import InputError
from blips.uq.checks import (
    FloatArray,
    finite_array,
    non_negative_array,
    positive_array,
    same_shape,
    standardised_error,
)
from blips.uq.metrics import equal_bins, tie_averaged

ONE_STD = math.erf(math.sqrt(0.5))
"""Probability of a Gaussian within one standard deviation, 0.6827."""


class Calibrator:
    """Base of the three calibrators: frozen dataclasses of numbers that go through JSON."""

    kind: ClassVar[str]

    def apply(self, std: npt.ArrayLike) -> FloatArray:
        """Return the recalibrated standard deviations, in the unit and shape of ``std``."""
        raise NotImplementedError

    def describe(self) -> str:
        """Say in words what happens to a std."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description."""
        items = vars(self).items()
        return {"kind": self.kind} | {k: list(v) if isinstance(v, tuple) else v for k, v in items}


@dataclass(frozen=True)
class ScaleCalibrator(Calibrator):
    """Multiply every standard deviation by one factor s.

    The Gaussian NLL of N(mean, s^2 std^2) has its only minimum at s^2 = mean(z^2), the ZMS. After
    ``apply`` the ZMS of the fitting data is exactly 1 and its NLL never larger than before.
    Ranking does not change.
    """

    kind: ClassVar[str] = "scale"
    factor: float  # s

    def __post_init__(self) -> None:
        if not (np.isfinite(self.factor) and self.factor > 0.0):
            raise InputError(
                f"the scale factor is {self.factor}; expected a finite number above zero. "
                "Check that the held-out errors are neither all zero nor overflowing."
            )

    @classmethod
    def fit(cls, mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike) -> Self:
        """Fit the factor on held-out predictions, standard deviations and references."""
        z, _ = standardised_error(mean, std, target)
        return cls(factor=float(np.sqrt(np.mean(z**2))))

    def apply(self, std: npt.ArrayLike) -> FloatArray:
        """Return s * std."""
        return self.factor * non_negative_array("std", std)

    def describe(self) -> str:
        """Name the factor."""
        return f"every std is multiplied by {self.factor:.3g}"


@dataclass(frozen=True)
class IsotonicCalibrator(Calibrator):
    """Replace std by a monotone function of itself that matches the observed error size.

    Held-out points are ordered by std and averaged in bins of equal count, at least ``min_count``
    points and at most 100 bins; a non-decreasing least-squares fit (pool adjacent violators) of
    the mean squared error on the mean variance gives knots. Between knots the logarithm of the new
    std is linear in that of the old; beyond them the last ratio is kept. The map is therefore
    continuous, strictly increasing (Spearman's rho and AUROC do not change), zero at zero alone,
    and consistent under a change of units. The variance of a knot is the mean squared error of the
    points pooled in it, an estimate whose relative error is sqrt(2 / count) for independent
    Gaussian errors. There is no finite-sample guarantee of coverage.
    """

    kind: ClassVar[str] = "isotonic"
    max_bins: ClassVar[int] = 100
    std_in: tuple[float, ...]  # the model's std at the knots, ascending
    std_out: tuple[float, ...]  # recalibrated, ascending

    def __post_init__(self) -> None:
        std_in = positive_array("std_in", self.std_in)
        std_out = positive_array("std_out", self.std_out)
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
        var = std.ravel()[order] ** 2
        squared_error = tie_averaged(var, z.ravel()[order] ** 2 * var)
        starts, counts = equal_bins(std.size, min(std.size // min_count, cls.max_bins))
        sums = np.stack([var, squared_error, np.ones_like(var)])  # [3, n]
        sums = _pool(sums, starts)
        sums = _pool(sums, _steps(sums[0] / counts))  # bins of one std
        fitted = isotonic_regression(sums[1] / sums[2], weights=sums[2]).x
        sums = _pool(sums, _steps(fitted))
        if sums[1, -1] <= 0.0:
            raise InputError(
                "all held-out errors are zero; expected errors to calibrate against. Use data "
                "that the model was not fitted to."
            )
        if sums[1, 0] <= 0.0:  # a first knot without error joins the next
            sums = _pool(sums, np.delete(np.arange(sums.shape[1]), 1))
        knots = np.sqrt(sums[:2] / sums[2])
        return cls(tuple(knots[0].tolist()), tuple(knots[1].tolist()))

    def apply(self, std: npt.ArrayLike) -> FloatArray:
        """Return the recalibrated standard deviations."""
        std = non_negative_array("std", std)
        knots = np.log(np.array(self.std_in))
        log_ratio = np.log(np.array(self.std_out)) - knots
        # Below the first knot the ratio is constant, so that zero needs no logarithm.
        log_std = np.log(np.maximum(std, self.std_in[0]))
        return std * np.exp(np.interp(log_std, knots, log_ratio))

    def describe(self) -> str:
        """Name the range of factors."""
        factors = np.divide(self.std_out, self.std_in)
        return (
            f"a monotone map of {len(factors)} knots multiplies std by {factors.min():.3g} to "
            f"{factors.max():.3g}"
        )


def _steps(ascending: FloatArray) -> npt.NDArray[np.intp]:
    """Find where each run of values equal to rounding begins."""
    return np.flatnonzero(np.diff(ascending, prepend=-np.inf) > 1e-12 * ascending)


def _pool(sums: FloatArray, starts: npt.NDArray[np.intp]) -> FloatArray:
    """Add up columns of [3, n] in blocks that begin at ``starts``."""
    return np.add.reduceat(sums, starts, axis=1)


@dataclass(frozen=True)
class ConformalCalibrator(Calibrator):
    """Return intervals that cover a chosen share of targets, by split conformal prediction.

    The score of a held-out point is abs(target - mean) / std. With n scores in ascending order,
    q(c) is number k = ceil((n + 1) c), and the interval is mean +- q(c) * std. If the n held-out
    points and the new one are exchangeable,

        c <= P(target inside) <= c + 1/(n + 1)      (the upper bound without ties)

    whatever the model and the error distribution. The probability is marginal, over held-out sets
    and new points; it does not hold at each std or for each element separately. Components of one
    structure are correlated, so that coverage of force components is approximate, as good as the
    number of STRUCTURES allows.
    """

    kind: ClassVar[str] = "conformal"
    scores: tuple[float, ...]  # of held-out data in ascending order, [n]

    def __post_init__(self) -> None:
        scores = finite_array("scores", self.scores)
        if scores.ndim != 1 or scores[0] < 0.0 or np.any(np.diff(scores) < 0.0):
            raise InputError(
                "conformal scores must be a flat, ascending list of non-negative numbers; "
                "expected the output of fit. Fit it again on held-out data."
            )

    @classmethod
    def fit(cls, mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike) -> Self:
        """Collect the scores of held-out data."""
        score = np.abs(standardised_error(mean, std, target)[0])
        return cls(scores=tuple(np.sort(score, axis=None).tolist()))

    def quantile(self, level: float = 0.9) -> float:
        """Return q(level), the multiple of std that covers with probability ``level``."""
        if not 0.0 < level < 1.0:
            raise InputError(f"level={level}; expected a probability between 0 and 1, as 0.9.")
        n = len(self.scores)
        number = math.ceil((n + 1) * level - 1e-9)  # guard against (n + 1) * level = 9.000000001
        if number > n:
            needed = math.ceil(level / (1.0 - level) - 1e-9)
            raise InputError(
                f"{n} held-out scores cannot guarantee {level:.2%} coverage; at least {needed} "
                "are needed. Hold out more data or ask for a lower level."
            )
        return self.scores[max(number, 1) - 1]

    def apply(self, std: npt.ArrayLike, level: float = ONE_STD) -> FloatArray:
        """Return q(level) * std; by default the half width that covers with probability 0.6827."""
        scale = self.quantile(level)
        if scale <= 0.0:
            raise InputError(
                f"the conformal quantile at level {level:.4g} is zero, because that share of the "
                "held-out errors is zero; expected data that the model was not fitted to."
            )
        return scale * non_negative_array("std", std)

    def describe(self) -> str:
        """Name the factor, and what it covers."""
        return (
            f"every std is multiplied by {self.quantile(ONE_STD):.3g}, so that one std covers 68 % "
            "of values like these"
        )


CALIBRATORS: dict[str, type[ScaleCalibrator | IsotonicCalibrator | ConformalCalibrator]] = {
    cls.kind: cls for cls in (ScaleCalibrator, IsotonicCalibrator, ConformalCalibrator)
}


def calibrator_from_dict(saved: Mapping[str, Any]) -> Calibrator:
    """Restore any calibrator from what its to_dict returned, by its ``kind``."""
    if saved.get("kind") not in CALIBRATORS:
        raise InputError(
            f"unknown kind of calibrator {saved.get('kind')!r}; expected one of "
            f"{', '.join(CALIBRATORS)}. Save calibrators with their to_dict."
        )
    cls = CALIBRATORS[saved["kind"]]
    names = {field.name for field in fields(cls)}
    if set(saved) != names | {"kind"}:
        raise InputError(
            f"the saved {cls.kind} calibrator has {', '.join(saved)}; expected kind, "
            f"{', '.join(sorted(names))}. It is damaged: fit it again."
        )
    values: dict[str, Any] = {
        name: tuple(map(float, saved[name])) if isinstance(saved[name], list) else saved[name]
        for name in names
    }
    return cls(**values)
