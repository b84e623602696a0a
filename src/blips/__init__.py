"""Bayesian learned interatomic potentials: error bars for any potential.

The public surface; everything, torch included, is imported when it is used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blips.conversion import bayesianize
    from blips.potential import BayesianPotential
    from blips.prediction import Prediction
    from blips.sim.calculator import Calculator
    from blips.train.checkpoint import save
    from blips.train.fit import fit
    from blips.train.load import load

__version__ = "0.1.0"

__all__ = [
    "BayesianPotential",
    "Calculator",
    "Prediction",
    "__version__",
    "bayesianize",
    "fit",
    "load",
    "save",
]

_LAZY = {
    "BayesianPotential": "blips.potential",
    "Calculator": "blips.sim.calculator",
    "Prediction": "blips.prediction",
    "bayesianize": "blips.conversion",
    "fit": "blips.train.fit",
    "load": "blips.train.load",
    "save": "blips.train.checkpoint",
}
_PACKAGES = ("active", "backbones", "baselines", "bayes", "data", "report", "sim", "train", "uq")


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _PACKAGES:
        return import_module(f"blips.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'blips' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
