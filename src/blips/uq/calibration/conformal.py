"""Intervals with a guaranteed share of targets inside, by split conformal prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from blips.errors import InputError
from blips.uq.calibration.saved import saved_entry
from blips.uq.checks import (
    FloatArray,
    finite_array,
    non_negative_array,
    same_shape,
    standardised_error,
)

ONE_SIGMA = math.erf(math.sqrt(0.5))
"""Probability of a Gaussian within one standard deviation, 0.6827."""


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
        mean, std = finite_array("mean", mean), non_negative_array("std", std)
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
        return scale * non_negative_array("std", std)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description; its size grows with the number of scores."""
        scores, simultaneous = list(self.scores), self.simultaneous
        return {"kind": self.kind, "scores": scores, "simultaneous": simultaneous}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Restore what to_dict returned."""
        scores = saved_entry(cls.kind, saved, "scores")
        simultaneous = bool(saved_entry(cls.kind, saved, "simultaneous"))
        return cls(scores=tuple(map(float, scores)), simultaneous=simultaneous)
