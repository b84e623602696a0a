"""Watch linear maps while a model runs, and take the gradient of a scalar by their outputs.

The maps run as they are, so that outputs stay those of the plain model, bit for bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blips.backbones.base import Backbone
from blips.bayes.linear import Product
from blips.errors import ConversionError
from blips.inference.maps import kind_of_map


class Call(NamedTuple):
    """One application of a chosen map, as it ran."""

    name: str
    layer: nn.Module
    h: Tensor
    output: Tensor
    version: int


@contextmanager
def watched(backbone: Backbone, names: Sequence[str]) -> Iterator[list[Call]]:
    """Record inputs and outputs of these maps while they run unchanged."""
    calls: list[Call] = []

    def note(name: str, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if not output.requires_grad:  # of frozen weights and constant inputs
            output = output.detach().requires_grad_()
        calls.append(Call(name, layer, args[0], output, output._version))
        return output

    with ExitStack() as stack:
        for name in names:
            layer = backbone.get_submodule(name)
            hook = layer.register_forward_hook(
                lambda layer, args, output, name=name: note(name, layer, args, output)  # pyright: ignore[reportArgumentType]
            )
            stack.callback(hook.remove)
        yield calls


def gradients(
    scalar: Tensor, calls: Sequence[Call], also: Sequence[Tensor] = (), *, differentiable: bool
) -> tuple[list[Product], list[Tensor]]:
    """Return every product of the calls with d(scalar)/dz, and gradients of other leaves."""
    for call in calls:
        if call.output._version != call.version:
            raise ConversionError(
                f"the output of {call.name!r} is changed in place after it was made, so its "
                "gradient is not that of the map; choose other maps"
            )
    outputs = [call.output for call in calls]
    found = torch.autograd.grad(
        scalar, [*outputs, *also], create_graph=differentiable, materialize_grads=True
    )
    products = [
        product
        for call, gradient in zip(calls, found, strict=False)
        for product in kind_of_map(call.layer, call.name).products(
            call.layer, call.name, call.h, gradient
        )
    ]
    return products, list(found[len(outputs) :])
