"""Covariances of forces in one pass, learned from a model's own samples."""

from blips.spread.distil import (
    DISPLACEMENTS,
    MANY_DISPLACEMENTS,
    displaced_copies,
    fit_spread,
    lesson,
)
from blips.spread.forces import ForceSpread

__all__ = [
    "DISPLACEMENTS",
    "MANY_DISPLACEMENTS",
    "ForceSpread",
    "displaced_copies",
    "fit_spread",
    "lesson",
]
