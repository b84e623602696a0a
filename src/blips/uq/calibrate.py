"""Recalibrate predicted standard deviations on held-out data.

| class | what it learns | what it promises |
|---|---|---|
| ScaleCalibrator | one factor on std | least Gaussian NLL of all constant factors |
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
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from blips.errors import InputError
from blips.uq.checks import FloatArray, checked_array, standardised_error

ONE_STD = math.erf(math.sqrt(0.5))  # probability of a Gaussian within one std, 0.6827


@dataclass(frozen=True)
class ScaleCalibrator:
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
    def fit(cls, mean: ArrayLike, std: ArrayLike, target: ArrayLike) -> Self:
        """Fit the factor on held-out predictions, standard deviations and references."""
        z = standardised_error(mean, std, target)
        return cls(factor=float(np.sqrt(np.mean(z**2))))

    def apply(self, std: ArrayLike) -> FloatArray:
        """Return s * std."""
        return self.factor * checked_array("std", std, "non-negative")

    def describe(self) -> str:
        """Say in words what happens to a std."""
        return f"every std is multiplied by {self.factor:.3g}"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description."""
        return {"kind": self.kind, **vars(self)}


@dataclass(frozen=True)
class ConformalCalibrator(ScaleCalibrator):
    """Know intervals that cover a chosen share of targets, by split conformal prediction.

    The score of a held-out point is abs(target - mean) / std. With n scores in ascending order,
    q(c) is number k = ceil((n + 1) c), and the interval is mean +- q(c) * std. If the n held-out
    points and the new one are exchangeable,

        c <= P(target inside) <= c + 1/(n + 1)      (the upper bound without ties)

    whatever the model and the error distribution. The probability is marginal, over held-out sets
    and new points; it does not hold at each std or for each element separately. Components of one
    structure are correlated, so that coverage of force components is approximate, as good as the
    number of STRUCTURES allows. The factor is q(0.6827), the half width in stds that covers as one
    std of a Gaussian does.
    """

    kind: ClassVar[str] = "conformal"
    scores: tuple[float, ...]  # of held-out data in ascending order, [n]

    def __post_init__(self) -> None:
        super().__post_init__()
        scores = checked_array("scores", self.scores)
        if scores.ndim != 1 or scores[0] < 0.0 or np.any(np.diff(scores) < 0.0):
            raise InputError(
                "conformal scores must be a flat, ascending list of non-negative numbers; "
                "expected the output of fit. Fit it again on held-out data."
            )

    @classmethod
    def fit(cls, mean: ArrayLike, std: ArrayLike, target: ArrayLike) -> Self:
        """Collect the scores of held-out data."""
        score = np.abs(standardised_error(mean, std, target))
        found = cls(factor=1.0, scores=tuple(np.sort(score, axis=None).tolist()))
        return replace(found, factor=found.quantile(ONE_STD))

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

    def describe(self) -> str:
        """Say in words what happens to a std."""
        return f"{super().describe()}, so that one std covers 68 % of values like these"


CALIBRATORS = {cls.kind: cls for cls in (ScaleCalibrator, ConformalCalibrator)}


def calibrator_from_dict(saved: Mapping[str, Any]) -> ScaleCalibrator:
    """Restore any calibrator from what its to_dict returned, by its ``kind``."""
    numbers: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()
    }
    return CALIBRATORS[numbers.pop("kind")](**numbers)
