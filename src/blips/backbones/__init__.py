"""Message-passing models and the contract that makes them Bayesian."""

import inspect
from typing import Any

from blips.backbones.base import AtomisticBackbone, Backbone, ReferenceEnergies
from blips.backbones.foreign import ForeignBackbone
from blips.backbones.generic import Adapter
from blips.backbones.painn import PaiNN
from blips.backbones.schnet import SchNet
from blips.backbones.zoo import ADAPTERS, RELEASED, adapter, load, nearest
from blips.errors import ConfigError

__all__ = [
    "ADAPTERS",
    "BACKBONES",
    "RELEASED",
    "Adapter",
    "AtomisticBackbone",
    "Backbone",
    "PaiNN",
    "ReferenceEnergies",
    "SchNet",
    "build",
    "family_of",
    "load",
]

BACKBONES: dict[str, type[Backbone]] = {"painn": PaiNN, "schnet": SchNet}
"""Backbones by name. With your own class added, `build`, configurations, `blips.save` and
`blips.load` know it; a program that loads its files has to add it, too."""


def build(name: str, **hyperparameters: Any) -> Backbone:
    """Build an untrained backbone by its name: `build("painn", cutoff=5.0, features=64)`."""
    if name not in BACKBONES and name not in ADAPTERS:
        raise ConfigError(f"unknown backbone {name!r}; {nearest(name, [*BACKBONES, *ADAPTERS])}")
    backbone = BACKBONES[name] if name in BACKBONES else adapter(name)
    valid = inspect.signature(backbone).parameters
    for key in hyperparameters:
        if key not in valid:
            raise ConfigError(f"backbone {name!r} has no setting {key!r}; {nearest(key, valid)}")
    return backbone(**hyperparameters)


def family_of(backbone: Backbone) -> str | None:
    """Return the name by which `build` makes such a backbone; None if it is not one of blips'."""
    if isinstance(backbone, ForeignBackbone):
        return backbone.family
    return next((name for name, cls in BACKBONES.items() if type(backbone) is cls), None)
