"""SchNetPack's layers as linear maps: `Dense` applies its activation itself.

`register` teaches them to `bayesianize`, which calls it when it meets a module of the package.
"""

from functools import cache
from typing import Any

from torch import Tensor

from blips.backbones.foreign import require
from blips.bayes.linear import MapKind, register_kind

PIP_LINE = "pip install schnetpack"


@cache
def register() -> None:
    """Teach blips `Dense`: activation(h W^T + b)."""
    base = require("schnetpack.nn.base", PIP_LINE)
    register_kind(MapKind(base.Dense, finish=_activate))


def _activate(layer: Any, z: Tensor) -> Tensor:
    return layer.activation(z)
