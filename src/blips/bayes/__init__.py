"""The mathematics of stochastic maps, testable without an atom."""

from blips.bayes.linear import MapKind, register_kind

__all__ = ["MapKind", "register_kind"]
