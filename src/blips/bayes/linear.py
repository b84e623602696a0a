"""The stochastic linear map: a layer that keeps its parameters and gains a posterior.

Conversion swaps the class of a layer, not its parameters: names, values, hooks and state dict
stay, and swapping back gives the plain layer. Without active noise the layer's own forward runs.

A `MapKind` says how a class of layers is a linear map: which canonical weight [out, in] and bias
it applies, and what it does to the result (an activation, say). Teach blips a new class with
`register_kind`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from torch import Tensor, nn

from blips.bayes.estimators import flipout_linear, frozen_linear, local_linear
from blips.bayes.noise import FrozenNoise, Noise, SampledNoise, active
from blips.errors import ConversionError, InputError

WeightAndBias = tuple[Tensor, Tensor | None]


def _own_weight_and_bias(layer: nn.Module) -> WeightAndBias:
    return cast(Tensor, layer.weight), cast(Tensor | None, layer.bias)


def _identity(_layer: nn.Module, z: Tensor) -> Tensor:
    return z


@dataclass(frozen=True)
class MapKind:
    """How a class of layers is a linear map z = finish(h W^T + b).

    Attributes:
        layer: the class; subclasses count unless they override `forward`.
        canonical: layer -> (weight [out, in], bias [out] or None), differentiable.
        finish: (layer, z) -> output; what `forward` does after the product and the bias.
    """

    layer: type[nn.Module]
    canonical: Callable[[nn.Module], WeightAndBias] = _own_weight_and_bias
    finish: Callable[[nn.Module, Tensor], Tensor] = _identity

    def matches(self, layer: nn.Module) -> bool:
        """Whether this kind describes what `layer` computes."""
        return isinstance(layer, self.layer) and type(layer).forward is self.layer.forward

    def sample(self, layer: nn.Module, name: str, h: Tensor, noise: Noise) -> Tensor:
        """Output for weights drawn by `noise`, h [rows, *irrep, in] -> [rows, *irrep, out]."""
        if h.ndim < 2:
            raise InputError(
                f"{name!r} got an input of shape {tuple(h.shape)}; a Bayesian map needs "
                "[rows, channels] or [rows, irrep axis, channels]"
            )
        coef = noise.coefficients_of(name, h.shape[0])
        weight, bias = self.canonical(layer)
        if isinstance(noise, FrozenNoise):
            z = frozen_linear(h, weight, bias, coef, noise.normal_like(name, weight))
        elif isinstance(noise, SampledNoise):
            z = _sampled(name, h, weight, bias, coef, noise)
        else:
            raise InputError(f"cannot sample with {type(noise).__name__}")
        return self.finish(layer, z)


def _sampled(
    name: str, h: Tensor, weight: Tensor, bias: Tensor | None, coef: Tensor, noise: SampledNoise
) -> Tensor:
    has_irrep_axis = h.ndim > 2
    if noise.estimator == "local" and has_irrep_axis:
        raise InputError(
            f"the local estimator cannot be used on {name!r}: its input {tuple(h.shape)} has an "
            "irrep axis, and noise drawn per component breaks equivariance. Use "
            'estimator="flipout", or "auto" (local on scalars, flipout elsewhere), or leave the '
            "map deterministic with exclude=..."
        )
    if noise.estimator == "flipout" or has_irrep_axis:
        deviation = None if noise.weights is None else noise.weights.deviation(name, weight)
        return flipout_linear(h, weight, bias, coef, noise.generators, deviation)
    return local_linear(h, weight, bias, coef, noise.generators)


_kinds: list[MapKind] = [MapKind(nn.Linear)]


def register_kind(kind: MapKind) -> None:
    """Teach the converter a class of linear-like layers; later registrations count first."""
    _kinds.insert(0, kind)


def kind_of(layer: nn.Module) -> MapKind | None:
    """The kind that describes `layer`, or None where blips does not know it as a linear map."""
    return next((kind for kind in _kinds if kind.matches(layer)), None)


class StochasticMap(nn.Module):
    """Mixin in front of a layer class: samples under active noise, is the layer otherwise."""

    map_name: str
    map_kind: MapKind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, or one with sampled weights."""
        noise = active()
        if noise is None:
            return super().forward(*args, **kwargs)
        return self.map_kind.sample(self, self.map_name, *args, noise=noise, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle through the layer's class: converted classes are made on the fly."""
        state = {k: v for k, v in self.__dict__.items() if k != "map_kind"}
        return _blank_copy, (base_class(self),), state


def _blank_copy(base: type[nn.Module]) -> nn.Module:
    cls = _stochastic_class(base)
    blank = cls.__new__(cls)
    nn.Module.__init__(blank)
    plain = base.__new__(base)
    kind = kind_of(plain)
    if kind is None:
        raise ConversionError(
            f"{base.__name__} is not registered as a linear map here; "
            "call blips.bayes.register_kind before loading this model"
        )
    blank.map_kind = kind
    return blank


@cache
def _stochastic_class(base: type[nn.Module]) -> type[StochasticMap]:
    return type(f"Stochastic{base.__name__}", (StochasticMap, base), {"__doc__": base.__doc__})


def base_class(layer: StochasticMap) -> type[nn.Module]:
    """The class that the layer had before conversion."""
    return type(layer).__mro__[2]


def make_stochastic(layer: nn.Module, name: str) -> StochasticMap:
    """Turn `layer` into a Bayesian map in place; parameters are untouched."""
    kind = kind_of(layer)
    if kind is None:
        raise ConversionError(
            f"{name!r} is a {type(layer).__name__}, which is not known as a linear map; "
            "register it with blips.bayes.register_kind(MapKind(...)) or exclude it"
        )
    layer.__class__ = _stochastic_class(type(layer))
    converted = cast(StochasticMap, layer)
    converted.map_name = name
    converted.map_kind = kind
    return converted


def make_plain(layer: StochasticMap) -> nn.Module:
    """Undo `make_stochastic` in place."""
    del layer.map_name
    del layer.map_kind
    plain = cast(nn.Module, layer)
    plain.__class__ = base_class(layer)
    return plain
