"""Bayesian learned interatomic potentials: error bars for any potential.

The public surface; everything, torch included, is imported when it is used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blips import (
        active,
        backbones,
        baselines,
        bayes,
        data,
        properties,
        report,
        sim,
        testing,
        train,
        uq,
    )
    from blips.conversion import bayesianize
    from blips.potential import BayesianPotential
    from blips.prediction import Prediction
    from blips.sim.calculator import Calculator
    from blips.train.checkpoint import save
    from blips.train.fit import fit
    from blips.train.released import load
    from blips.uq.assess import calibrate, evaluate

__version__ = "0.1.0"

__all__ = [
    "BayesianPotential",
    "Calculator",
    "Prediction",
    "active",
    "backbones",
    "baselines",
    "bayes",
    "bayesianize",
    "calibrate",
    "data",
    "evaluate",
    "fit",
    "load",
    "properties",
    "report",
    "save",
    "sim",
    "testing",
    "train",
    "uq",
]

_LAZY = {
    "BayesianPotential": "blips.potential",
    "Calculator": "blips.sim.calculator",
    "Prediction": "blips.prediction",
    "bayesianize": "blips.conversion",
    "calibrate": "blips.uq.assess",
    "evaluate": "blips.uq.assess",
    "fit": "blips.train.fit",
    "load": "blips.train.released",
    "save": "blips.train.checkpoint",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in __all__:
        return import_module(f"blips.{name}")
    raise AttributeError(f"module 'blips' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
