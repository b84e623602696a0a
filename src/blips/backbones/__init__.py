"""Message-passing models and the contract that makes them Bayesian.

Released potentials come by name: `load("chgnet")`, `load("sevennet-0")`, ... Each name belongs to
one adapter module, imported when it is asked for. `weights` is a file that the package itself
wrote, for models whose package does not carry them; reading such a file may run code that it
contains, so it needs `trust=True` wherever the format is a pickle.
"""

import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Any

from blips.backbones.base import AtomisticBackbone, Backbone, ReferenceEnergies
from blips.backbones.foreign import ForeignBackbone
from blips.backbones.generic import Adapter
from blips.backbones.painn import PaiNN
from blips.backbones.schnet import SchNet
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

ADAPTERS = {  # family -> module of this folder and class
    "chgnet": "chgnet:CHGNet",
    "mace": "mace:MACE",
    "mattersim": "mattersim:MatterSim",
    "orb": "orb:Orb",
    "orb-direct": "orb:DirectOrb",
    "sevennet": "sevennet:SevenNet",
}
# name -> (family, options of the adapter's `released`)
RELEASED: dict[str, tuple[str, dict[str, Any]]] = {
    "chgnet": ("chgnet", {"version": "0.3.0"}),
    "chgnet-r2scan": ("chgnet", {"version": "r2scan"}),
    "mace": ("mace", {}),
    "mattersim-1m": ("mattersim", {}),
    **{
        f"orb-v3-{kind}-{name}": (family, {"variant": f"{kind}-{name}"})
        for kind, family in (("conservative", "orb"), ("direct", "orb-direct"))
        for name in ("20-mpa", "20-omat", "inf-mpa", "inf-omat")
    },
    "sevennet-0": ("sevennet", {"checkpoint": "7net-0"}),
    "sevennet-l3i5": ("sevennet", {"checkpoint": "7net-l3i5"}),
    "sevennet-mf-0": ("sevennet", {"checkpoint": "7net-mf-0"}),
}


def build(name: str, **hyperparameters: Any) -> Backbone:
    """Build an untrained backbone by its name: `build("painn", cutoff=5.0, features=64)`."""
    if name not in BACKBONES and name not in ADAPTERS:
        raise ConfigError(f"unknown backbone {name!r}; {nearest(name, [*BACKBONES, *ADAPTERS])}")
    backbone = BACKBONES[name] if name in BACKBONES else adapter(name)
    refuse_settings(f"backbone {name!r}", hyperparameters, inspect.signature(backbone).parameters)
    return backbone(**hyperparameters)


def family_of(backbone: Backbone) -> str | None:
    """Return the name by which `build` makes such a backbone; None if it is not one of blips'."""
    cls = type(backbone)
    place = f"{cls.__module__}:{cls.__name__}".removeprefix(f"{__name__}.")
    known = (BACKBONES | ADAPTERS).items()
    return next((name for name, one in known if one is cls or one == place), None)


def load(name: str, **options: Any) -> ForeignBackbone:
    """Load a released potential by its name, with options such as `weights` (a file), `trust`."""
    if name not in RELEASED:
        raise ConfigError(f"unknown model {name!r}; {nearest(name, RELEASED)}")
    family, preset = RELEASED[name]
    make = adapter(family).released
    refuse_settings(name, options, inspect.signature(make).parameters.keys() - preset.keys())
    backbone = make(**preset, **options)
    backbone.pretrained = True
    return backbone


def adapter(family: str) -> type[ForeignBackbone]:
    """Return the adapter class of a family; its package is imported when a model is made."""
    return resolve_name(f"blips.backbones.{ADAPTERS[family]}")


def refuse_settings(name: str, settings: Iterable[str], valid: Iterable[str]) -> None:
    """Raise an error for the first setting that is not valid."""
    for key in settings:
        if key not in valid:
            raise ConfigError(f"{name} has no setting {key!r}; {nearest(key, valid)}")


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return the nearest valid name, and all valid ones, for error messages."""
    valid = sorted(valid)
    close = get_close_matches(word, valid, n=1, cutoff=0.4)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}Valid: {', '.join(valid)}"
