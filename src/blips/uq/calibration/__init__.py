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
separately; arrays of any shape are taken as one pool of scalars. A sigma of zero, where symmetry
makes a model certain, stays zero in ``apply``; ``fit`` needs sigmas above zero. No promise survives
a change of distribution: what was fitted in-distribution says nothing certain about structures of a
new kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blips.errors import InputError
from blips.uq.calibration.conformal import ONE_SIGMA, ConformalCalibrator
from blips.uq.calibration.isotonic import IsotonicCalibrator
from blips.uq.calibration.scale import ScaleCalibrator

__all__ = [
    "ONE_SIGMA",
    "Calibrator",
    "ConformalCalibrator",
    "IsotonicCalibrator",
    "ScaleCalibrator",
    "calibrator_from_dict",
]

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
