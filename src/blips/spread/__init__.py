"""Covariances of forces in one pass, learned from a model's own samples."""

from blips.spread.distil import distil_spread
from blips.spread.forces import ForceSpread

__all__ = ["ForceSpread", "distil_spread"]
