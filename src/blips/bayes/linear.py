"""The stochastic linear map: a layer that keeps its parameters and gains a posterior.

Conversion swaps the class of a layer, not its parameters: names, values, hooks and state dict
stay, and swapping back gives the plain layer. Without active noise the layer's own forward runs.

A `MapKind` says how a class of layers is linear. Teach blips a new class with `register_kind`. The
functions that a kind is made of are those of a module (no lambdas, no closures) wherever converted
models are pickled. A layer with several matrices has a subclass that overrides `sample`, `products`
and `shapes`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blips.bayes.noise import Noise, active
from blips.errors import ConversionError, InputError

WeightAndBias = tuple[Tensor, Tensor | None]


class Product(NamedTuple):
    """One matrix applied to the rows of a pass, at the posterior means."""

    name: str  # of the matrix
    h: Tensor  # [rows, *irrep, in]
    weight: Tensor  # [out, in]
    gradient: Tensor  # derivative of a scalar by the rows of the product, [rows, *irrep, out]


def _own_weight_and_bias(layer: nn.Module) -> WeightAndBias:
    return cast(Tensor, layer.weight), cast(Tensor | None, layer.bias)


def _identity(_layer: nn.Module, z: Tensor) -> Tensor:
    return z


@dataclass(frozen=True)
class MapKind:
    """A class of layers that are a linear map z = finish(h W^T + b)."""

    layer: type[nn.Module]  # subclasses count unless they override `forward`
    # weight [out, in] and bias [out] or None, differentiable
    canonical: Callable[[nn.Module], WeightAndBias] = _own_weight_and_bias
    # what `forward` does after the product and the bias (an activation, say)
    finish: Callable[[nn.Module, Tensor], Tensor] = _identity

    def matches(self, layer: nn.Module) -> bool:
        """Return whether this kind describes what `layer` computes."""
        return isinstance(layer, self.layer) and type(layer).forward is self.layer.forward

    def sample(self, layer: nn.Module, name: str, h: Tensor, noise: Noise) -> Tensor:
        """Sample the output by `noise`, h [rows, *irrep, in] -> [rows, *irrep, out]."""
        if h.ndim < 2:
            raise InputError(
                f"{name!r} got an input of shape {tuple(h.shape)}; a Bayesian map needs "
                "[rows, channels] or [rows, irrep axis, channels]"
            )
        coef = noise.coefficients_of(name, h.shape[0])
        weight, bias = self.canonical(layer)
        return self.finish(layer, noise.linear(name, h, weight, bias, coef))

    def products(self, layer: nn.Module, name: str, h: Tensor, gradient: Tensor) -> list[Product]:
        """Return the matrix as applied to h; `gradient` is that of a scalar by the output."""
        weight, bias = self.canonical(layer)
        if self.finish is not _identity:
            z = F.linear(h, weight, bias)
            (gradient,) = torch.autograd.grad(self.finish(layer, z), z, gradient, create_graph=True)
        return [Product(name, h, weight, gradient)]

    def shapes(self, layer: nn.Module, name: str) -> dict[str, tuple[int, ...]]:
        """Return [out, in] of each matrix, by its name."""
        return {name: tuple(self.canonical(layer)[0].shape)}


_kinds: list[MapKind] = [MapKind(nn.Linear)]


def register_kind(kind: MapKind) -> None:
    """Register a class of linear-like layers; later registrations take precedence."""
    if kind not in _kinds:
        _kinds.insert(0, kind)


def kind_of(layer: nn.Module) -> MapKind | None:
    """Return the kind that describes `layer`; None if blips knows no such linear map."""
    return next((kind for kind in _kinds if kind.matches(layer)), None)


def require_kind(layer: nn.Module, name: str) -> MapKind:
    """Return the kind of linear map that a layer is, or was before conversion; an error if none."""
    kind = kind_of(layer) or getattr(layer, "map_kind", None)
    if kind is None:
        raise ConversionError(
            f"{name!r} is a {type(layer).__name__}, which is not known as a linear map; choose "
            "other maps, or register it with blips.bayes.register_kind(MapKind(...))"
        )
    return kind


class StochasticMap(nn.Module):
    """Mixin in front of a layer class: samples under active noise, is the layer otherwise."""

    plain: ClassVar[type[nn.Module]]  # class of the layer before conversion
    map_name: str
    map_kind: MapKind

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle through the layer's class: converted classes are made on the fly.

        The layer's own way to get and set its state counts, as some keep compiled code in it.
        """
        return _blank_copy, (type(self).plain,), self.__getstate__()


def _blank_copy(base: type[nn.Module]) -> nn.Module:
    cls = _stochastic_class(base)
    blank = cls.__new__(cls)
    nn.Module.__init__(blank)
    return blank


@cache
def _stochastic_class(base: type[nn.Module]) -> type[StochasticMap]:
    plain_forward = base.forward  # called as it is: posterior means are to cost what the layer does

    def forward(self: StochasticMap, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward, or one with sampled weights."""
        noise = active()
        if noise is None:
            return plain_forward(self, *args, **kwargs)
        return self.map_kind.sample(self, self.map_name, *args, noise=noise, **kwargs)

    contents = {"__doc__": base.__doc__, "forward": forward, "plain": base}
    return type(f"Stochastic{base.__name__}", (StochasticMap, base), contents)


def make_stochastic(layer: nn.Module, name: str) -> StochasticMap:
    """Turn `layer` into a Bayesian map in place; parameters are untouched."""
    kind = require_kind(layer, name)
    layer.__class__ = _stochastic_class(type(layer))
    converted = cast(StochasticMap, layer)
    converted.map_name = name
    converted.map_kind = kind
    return converted


def make_plain(layer: StochasticMap) -> nn.Module:
    """Undo `make_stochastic` in place."""
    del layer.map_name, layer.map_kind
    plain = cast(nn.Module, layer)
    plain.__class__ = layer.plain
    return plain
