"""One factor on every sigma, the least that recalibration can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from blips.errors import InputError
from blips.uq.calibration.saved import saved_entry
from blips.uq.checks import FloatArray, non_negative_array, standardised_error


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
        return self.factor * non_negative_array("std", std)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description."""
        return {"kind": self.kind, "factor": self.factor}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Restore what to_dict returned."""
        return cls(factor=float(saved_entry(cls.kind, saved, "factor")))
