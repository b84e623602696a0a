"""Layers of e3nn, and of packages built on it, as linear maps.

==========================  ====================================================================
`e3nn.o3.Linear`            one flat weight; a block for each instruction (input irrep -> output
                            irrep), normalised by its path weight
`e3nn.nn._fc._Layer`        a layer of `FullyConnectedNet`: weight [in, out] over the square root
                            of its fan-in, activation inside
`nequip` ScalarLinearLayer  weight [in, out] times a constant
==========================  ====================================================================

`register` teaches them to `bayesianize`; adapters are `E3nnBackbone`s, which call it when a model
is made. Nothing is imported before, and converted layers carry what they need into copies and
pickles.
"""

import io
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from blips.backbones.foreign import ForeignBackbone
from blips.bayes.linear import Block, BlockKind, MapKind, WeightAndBias, register_kind
from blips.errors import require

E3NN_PIP_LINE = "pip install e3nn"
NEQUIP_PIP_LINE = "pip install nequip"
UNPICKLE_ANYTHING = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
COUPLING = re.compile(r"_w3j_(\d+)_(\d+)_(\d+)")  # how e3nn's generated code names a 3j symbol


@cache
def register() -> None:
    """Register the linear layers of e3nn (0.4.4 and later)."""
    with contained():
        o3 = require("e3nn.o3", E3NN_PIP_LINE)
        fully_connected = require("e3nn.nn._fc", E3NN_PIP_LINE)
    register_kind(E3nnLinear(o3.Linear, linear_blocks, linear_width, linear_bias))
    register_kind(MapKind(fully_connected._Layer, layer_weight, layer_finish))


@contextmanager
def contained() -> Iterator[None]:
    """Import, make or read models of e3nn's family without a trace in the process.

    e3nn 0.4 reads its constants, a pickle inside the package, with torch's old permission to
    unpickle anything. The permission ends with the block, also where a package gives it for good;
    what it prints or warns of is not shown.
    """
    before = os.environ.get(UNPICKLE_ANYTHING)
    os.environ[UNPICKLE_ANYTHING] = "1"
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        if before is None:
            del os.environ[UNPICKLE_ANYTHING]
        else:
            os.environ[UNPICKLE_ANYTHING] = before


@cache
def register_nequip() -> None:
    """Register the scalar layers of NequIP and Allegro; their other maps are e3nn's."""
    register()
    mlp = require("nequip.nn.mlp", NEQUIP_PIP_LINE)
    register_kind(MapKind(mlp.ScalarLinearLayer, scalar_layer_weight))


class E3nnBackbone(ForeignBackbone):
    """A potential of another package that is made of e3nn's layers."""

    def __init__(self, model: nn.Module, cutoff: float, numbers: Iterable[int]) -> None:
        register()
        super().__init__(model, cutoff, numbers)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert; recompute the couplings at full accuracy in another precision."""
        before = next(self.model.parameters()).dtype
        super()._apply(fn, recurse)
        if next(self.model.parameters()).dtype != before:
            refine_couplings(self.model)
        return self


class E3nnLinear(BlockKind):
    """`o3.Linear` with a weight of its own, not one that comes with every call."""

    def matches(self, layer: Any) -> bool:
        """Return whether this kind describes what `layer` computes."""
        # A weight that is not its own is empty, or has axes in front.
        return super().matches(layer) and layer.weight.ndim == 1 and layer.weight.numel() > 0


def linear_blocks(linear: Any) -> list[Block]:
    """Return the blocks of an `o3.Linear`, in the order of its flat weight."""
    sources, targets = linear.irreps_in.slices(), linear.irreps_out.slices()
    paths = [path for path in linear.instructions if path.i_in >= 0 and 0 not in path.path_shape]
    sizes = [path.path_shape[0] * path.path_shape[1] for path in paths]
    blocks: list[Block] = []
    for path, flat in zip(paths, linear.weight.split_with_sizes(sizes), strict=True):
        irrep = linear.irreps_in[path.i_in].ir
        weight = flat.view(path.path_shape).T * path.path_weight  # [out, in]
        source, target = sources[path.i_in], targets[path.i_out]
        blocks.append(Block(weight, source, target, irrep.dim, irrep.is_scalar()))
    return blocks


def linear_width(linear: Any) -> int:
    """Return the number of columns of an `o3.Linear`'s output."""
    return linear.irreps_out.dim


def linear_bias(linear: Any) -> Tensor | None:
    """Return the bias of an `o3.Linear` (on some of its scalars) as wide as its output."""
    if linear.bias.numel() == 0:
        return None
    biased = [path.i_out for path in linear.instructions if path.i_in < 0]
    terms = iter(linear.bias.split_with_sizes([linear.irreps_out[i].dim for i in biased]))
    parts = [
        next(terms) if i in biased else linear.bias.new_zeros(mul_irrep.dim)
        for i, mul_irrep in enumerate(linear.irreps_out)
    ]
    return torch.cat(parts)


def layer_weight(dense: Any) -> WeightAndBias:
    """Compute the weight [out, in] of a `_Layer`: w / sqrt(fan-in * var_in), no bias."""
    variance = dense.h_in * dense.var_in
    if dense.act is None:
        variance = variance / dense.var_out
    return dense.weight.T / variance**0.5, None


def layer_finish(dense: Any, z: Tensor) -> Tensor:
    """Apply what a `_Layer` does after the product: its activation, scaled."""
    return z if dense.act is None else dense.act(z) * dense.var_out**0.5


def scalar_layer_weight(dense: Any) -> WeightAndBias:
    """Return weight [out, in] and bias of a NequIP `ScalarLinearLayer`."""
    return dense.weight.T * dense.alpha, dense.bias


def refine_couplings(model: nn.Module) -> None:
    """Write e3nn's 3j symbols into `model` with all digits of its precision.

    A model that was made in single precision keeps them rounded when it is turned into double
    precision; rotations would then be exact to seven digits only. Signs (they differ between
    versions of e3nn) stay.
    """
    o3 = require("e3nn.o3", E3NN_PIP_LINE)
    for name, symbol in model.named_buffers():
        if match := COUPLING.fullmatch(name.rpartition(".")[2]):
            exact = o3.wigner_3j(*map(int, match.groups()), dtype=torch.float64).to(symbol.device)
            symbol.copy_(exact * (symbol * exact).sum().sign())
