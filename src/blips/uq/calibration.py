"""Recalibration of predicted sigmas on held-out data.

Three calibrators with the same verbs, in the order of how much they correct:

| class | what it learns | what it promises |
|---|---|---|
| ScaleCalibrator | one factor on sigma | least Gaussian NLL of all constant factors |
| IsotonicCalibrator | a monotone map of sigma | locally right error size, ranking unchanged |
| ConformalCalibrator | quantiles of abs(error)/sigma | finite-sample coverage of intervals |

The class method ``fit(mean, std, target)`` returns a fitted, immutable calibrator, ``apply(std)``
gives the recalibrated sigma in the same unit and shape, ``to_dict`` and ``from_dict`` go through
JSON. Fit on data that neither trained the model nor tests it, and fit energies and forces
separately; arrays of any shape are taken as one pool of scalars. No promise survives a change of
distribution: what was fitted in-distribution says nothing certain about structures of a new kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from blips.errors import InputError
from blips.uq.metrics import (
    FloatArray,
    finite_array,
    positive_array,
    same_shape,
    standardised_error,
    tie_averaged,
)

ONE_SIGMA = math.erf(math.sqrt(0.5))
"""Probability of a Gaussian within one standard deviation, 0.6827."""


def _entry(kind: str, saved: Mapping[str, Any], key: str) -> Any:
    """Read a key of a saved calibrator after checking its kind."""
    if saved.get("kind") != kind:
        raise InputError(
            f"the saved calibrator is of kind {saved.get('kind')!r}; expected {kind!r}. "
            "Load it with calibrator_from_dict, which chooses the class."
        )
    if key not in saved:
        raise InputError(f"the saved {kind} calibrator lacks {key!r}; it is damaged: fit it again.")
    return saved[key]


@dataclass(frozen=True)
class ScaleCalibrator:
    """Multiply every sigma by one factor s.

    The Gaussian NLL of N(mean, s^2 std^2) has its only minimum at s^2 = mean(z^2), the ZMS. After
    ``apply`` the ZMS of the fitting data is exactly 1 and its NLL never larger than before.
    Ranking does not change.

    Attributes:
        factor: s, without unit.
    """

    kind: ClassVar[str] = "scale"
    factor: float

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
        """Return the recalibrated standard deviations, s * std."""
        return self.factor * positive_array("std", std)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description."""
        return {"kind": self.kind, "factor": self.factor}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Restore what to_dict returned."""
        return cls(factor=float(_entry(cls.kind, saved, "factor")))


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


@dataclass(frozen=True)
class IsotonicCalibrator:
    """Replace sigma by a monotone function of itself that matches the observed error size.

    Held-out points are ordered by std^2 and averaged in bins of equal count, at least ``min_count``
    points and at most 100 bins; a non-decreasing least-squares fit (pool adjacent violators) of
    the mean squared error on the mean variance gives knots. Between knots log sigma is linear in
    log std; beyond them the last ratio sigma/std is kept. The map is therefore continuous, strictly
    increasing (Spearman's rho and AUROC do not change), positive everywhere, and consistent under a
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
        log_std = np.log(positive_array("std", std))
        knots = np.log(np.array(self.std_in))
        log_ratio = np.log(np.array(self.std_out)) - knots
        return np.exp(log_std + np.interp(log_std, knots, log_ratio))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description."""
        return {"kind": self.kind, "std_in": list(self.std_in), "std_out": list(self.std_out)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Restore what to_dict returned."""
        std_in, std_out = _entry(cls.kind, saved, "std_in"), _entry(cls.kind, saved, "std_out")
        return cls(std_in=tuple(map(float, std_in)), std_out=tuple(map(float, std_out)))


def _merge_ties(
    x: FloatArray, y: FloatArray, weight: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Average neighbouring bins of equal abscissa (a sigma shared by many points)."""
    starts = np.flatnonzero(np.diff(x, prepend=-np.inf) > 1e-12 * x)
    total = np.add.reduceat(weight, starts)
    return x[starts], np.add.reduceat(weight * y, starts) / total, total


@dataclass(frozen=True)
class ConformalCalibrator:
    """Split conformal prediction with the score abs(target - mean) / std.

    With n held-out scores in ascending order, q(c) is number k = ceil((n + 1) c), and the interval
    is mean +- q(c) * std. If the n held-out points and the new one are exchangeable,

        c <= P(target inside) <= c + 1/(n + 1)      (the upper bound without ties)

    whatever the model and the error distribution. The probability is marginal, over held-out sets
    and new points; it does not hold at each sigma or for each element separately.

    Components of one structure are correlated, so pooled force components are not exchangeable one
    by one: coverage is then approximate, as good as the number of STRUCTURES allows. For an exact
    statement pass ``groups``: the score of a structure is its largest one, n counts structures, and
    the interval covers ALL components of a new structure at once with probability c (wider).

    Attributes:
        scores: held-out scores in ascending order, [n], without unit.
        simultaneous: whether scores are maxima over groups.
    """

    kind: ClassVar[str] = "conformal"
    scores: tuple[float, ...]
    simultaneous: bool = False

    def __post_init__(self) -> None:
        scores = finite_array("scores", self.scores)
        if scores.ndim != 1 or scores[0] < 0.0 or np.any(np.diff(scores) < 0.0):
            raise InputError(
                "conformal scores must be a flat, ascending list of non-negative numbers; "
                "expected the output of fit. Fit it again on held-out data."
            )

    @classmethod
    def fit(
        cls,
        mean: npt.ArrayLike,
        std: npt.ArrayLike,
        target: npt.ArrayLike,
        groups: npt.ArrayLike | None = None,
    ) -> Self:
        """Collect the scores of held-out data.

        Args:
            mean: predictions.
            std: standard deviations, same shape.
            target: references, same shape.
            groups: structure of every row (first axis), for simultaneous coverage; None pools.
        """
        score = np.abs(standardised_error(mean, std, target)[0])
        if groups is None:
            return cls(scores=tuple(np.sort(score, axis=None).tolist()))
        labels = np.asarray(groups)
        if score.ndim == 0 or labels.shape != score.shape[:1]:
            raise InputError(
                f"groups have shape {labels.shape} for data of shape {score.shape}; expected one "
                "label per row, e.g. np.repeat(np.arange(len(n_atoms)), n_atoms)."
            )
        unique, index = np.unique(labels, return_inverse=True)
        largest = np.zeros(len(unique))
        np.maximum.at(largest, index.reshape(-1), score.reshape(len(score), -1).max(axis=1))
        return cls(scores=tuple(np.sort(largest).tolist()), simultaneous=True)

    def quantile(self, level: float = 0.9) -> float:
        """Return q(level), the multiple of sigma that covers with probability ``level``."""
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

    def interval(
        self, mean: npt.ArrayLike, std: npt.ArrayLike, level: float = 0.9
    ) -> tuple[FloatArray, FloatArray]:
        """Return the lower and upper ends of the prediction interval, mean -+ q(level) * std."""
        mean, std = finite_array("mean", mean), positive_array("std", std)
        same_shape(mean=mean, std=std)
        half_width = self.quantile(level) * std
        return mean - half_width, mean + half_width

    def apply(self, std: npt.ArrayLike, level: float = ONE_SIGMA) -> FloatArray:
        """Return q(level) * std; by default the "one sigma" that covers with probability 0.6827."""
        scale = self.quantile(level)
        if scale <= 0.0:
            raise InputError(
                f"the conformal quantile at level {level:.4g} is zero, because that share of the "
                "held-out errors is zero; expected data that the model was not fitted to."
            )
        return scale * positive_array("std", std)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description; its size grows with the number of scores."""
        scores, simultaneous = list(self.scores), self.simultaneous
        return {"kind": self.kind, "scores": scores, "simultaneous": simultaneous}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Restore what to_dict returned."""
        scores = _entry(cls.kind, saved, "scores")
        simultaneous = bool(_entry(cls.kind, saved, "simultaneous"))
        return cls(scores=tuple(map(float, scores)), simultaneous=simultaneous)


Calibrator = ScaleCalibrator | IsotonicCalibrator | ConformalCalibrator


def calibrator_from_dict(saved: Mapping[str, Any]) -> Calibrator:
    """Restore any calibrator from what its to_dict returned, by its ``kind``."""
    for cls in (ScaleCalibrator, IsotonicCalibrator, ConformalCalibrator):
        if saved.get("kind") == cls.kind:
            return cls.from_dict(saved)
    raise InputError(
        f"unknown kind of calibrator {saved.get('kind')!r}; expected 'scale', 'isotonic' or "
        "'conformal'. Save calibrators with their to_dict."
    )
