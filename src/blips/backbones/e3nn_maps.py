"""Layers of e3nn, and of packages built on it, as linear maps.

==========================  ====================================================================
`e3nn.o3.Linear`            one flat weight; a matrix for each instruction (input irrep -> output
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
from functools import cache, reduce
from typing import Any, Self

import torch
from torch import Tensor, nn

from blips.backbones.foreign import ForeignBackbone
from blips.bayes.linear import MapKind, Product, WeightAndBias, register_kind
from blips.bayes.noise import Noise
from blips.errors import InputError, require

E3NN_PIP_LINE = "pip install e3nn"
UNPICKLE_ANYTHING = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
COUPLING = re.compile(r"_w3j_(\d+)_(\d+)_(\d+)")  # how e3nn's generated code names a 3j symbol


@cache
def register() -> None:
    """Register the linear layers of e3nn (0.4.4 and later)."""
    with contained():
        o3 = require("e3nn.o3", E3NN_PIP_LINE)
        fully_connected = require("e3nn.nn._fc", E3NN_PIP_LINE)
    register_kind(E3nnLinear(o3.Linear))
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
    mlp = require("nequip.nn.mlp", "pip install nequip")
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


class E3nnLinear(MapKind):
    """`o3.Linear` with a weight of its own: one matrix for each path from irrep to irrep.

    The features of a row are the channels of several irreps side by side, [rows, mul * (2l + 1)]
    with the components inside. The map mixes channels of the same irrep, never their components:

        z_t = b_t + sum over paths k into t of  W_k h_s(k),    W_k [out, in], h_s [rows, 2l + 1, in]

    Every path is an ordinary linear map with an irrep axis. Its weights get the posterior
    N(W_k, coef W_k^2) with the layer's one coefficient per row, and signs and noise that are the
    same for all components, so each sample is exactly as equivariant as the layer. Scalars, which
    are invariant under rotation and reflection, have no such axis: noise may be drawn for their
    outputs (the local estimator).
    """

    def matches(self, layer: Any) -> bool:
        """Return whether this kind describes what `layer` computes."""
        # A weight that is not its own is empty, or has axes in front.
        return super().matches(layer) and layer.weight.ndim == 1 and layer.weight.numel() > 0

    def sample(self, layer: Any, name: str, h: Tensor, noise: Noise) -> Tensor:
        """Compute the output for weights drawn by `noise`, [rows, columns] -> [rows, width]."""
        if h.ndim != 2:
            raise InputError(
                f"{name!r} got an input of shape {tuple(h.shape)}; an equivariant Bayesian map "
                "needs [rows, channels and components]"
            )
        coef = noise.coefficients_of(name, h.shape[0])
        inputs = h.split_with_sizes([one.dim for one in layer.irreps_in], dim=1)
        terms: dict[int, list[Tensor]] = {}  # of each irrep of the output
        for k, (path, weight) in enumerate(paths_and_weights(layer)):
            x, irrep = inputs[path.i_in], layer.irreps_in[path.i_in].ir
            if not irrep.is_scalar():
                x = _channels(x, irrep.dim).contiguous()  # [rows, 2l + 1, in]
            z = noise.linear(f"{name}[{k}]", x, weight, None, coef)
            terms.setdefault(path.i_out, []).append(z if irrep.is_scalar() else z.mT.flatten(1))
        outputs = [
            reduce(torch.add, terms[i]) if i in terms else h.new_zeros(len(h), one.dim)
            for i, one in enumerate(layer.irreps_out)
        ]
        biased = [path.i_out for path in layer.instructions if path.i_in < 0]
        biases = layer.bias.split_with_sizes([layer.irreps_out[i].dim for i in biased])
        for i, bias in zip(biased, biases, strict=True):
            outputs[i] = outputs[i] + bias
        return torch.cat(outputs, dim=1)

    def products(self, layer: Any, name: str, h: Tensor, gradient: Tensor) -> list[Product]:
        """Return one product for each path, [rows, 2l + 1, channels]."""
        sources, targets = layer.irreps_in.slices(), layer.irreps_out.slices()
        found: list[Product] = []
        for k, (path, weight) in enumerate(paths_and_weights(layer)):
            dim = layer.irreps_in[path.i_in].ir.dim
            x, g = h[:, sources[path.i_in]], gradient[:, targets[path.i_out]]
            found.append(Product(f"{name}[{k}]", _channels(x, dim), weight, _channels(g, dim)))
        return found

    def shapes(self, layer: Any, name: str) -> dict[str, tuple[int, ...]]:
        """Return [out, in] of each path."""
        weights = enumerate(weight for _, weight in paths_and_weights(layer))
        return {f"{name}[{k}]": tuple(weight.shape) for k, weight in weights}


def _channels(columns: Tensor, dim: int) -> Tensor:
    """Reshape [rows, channels * dim] -> [rows, dim, channels]."""
    return columns.reshape(len(columns), columns.shape[1] // dim, dim).mT


def paths_and_weights(linear: Any) -> list[tuple[Any, Tensor]]:
    """Return paths and matrices [out, in] of an `o3.Linear`, in the order of its flat weight."""
    paths = [path for path in linear.instructions if path.i_in >= 0 and 0 not in path.path_shape]
    sizes = [path.path_shape[0] * path.path_shape[1] for path in paths]
    return [
        (path, flat.view(path.path_shape).T * path.path_weight)
        for path, flat in zip(paths, linear.weight.split_with_sizes(sizes), strict=True)
    ]


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
