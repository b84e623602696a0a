"""Choose the maps to condition (readout, all Bayesian maps, or some by name) and watch them run.

Watched maps run as they are, so that outputs stay those of the plain model, bit for bit; the
gradient of a scalar by their outputs is taken afterwards. Threads may share a model: each watches
its own passes alone.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blips import keys
from blips.backbones.base import AtomisticBackbone, Backbone
from blips.bayes.convert import first_match, matches
from blips.bayes.linear import Product, StochasticMap, kind_of, require_kind
from blips.bayes.sketch import Sketch
from blips.errors import ConversionError, InputError

READOUT, ALL = "readout", "all"
STRUCTURE = "structure"  # row type of maps that act on structures
_registering = threading.Lock()  # torch counts its hooks without one


@dataclass(frozen=True)
class ChosenMaps:
    """The maps whose weights are conditioned.

    They are `last` where the energy of an atom (of a structure) depends on its own rows alone, so
    that the rest of the network is differentiated once where these maps are twice.
    """

    roles: Mapping[str, str]  # row type of each map, by name
    sketch: Sketch  # coordinates v of their weights
    last: bool

    @classmethod
    def of(
        cls, backbone: Backbone, roles: Mapping[str, str], dimension: int, seed: int, *, last: bool
    ) -> "ChosenMaps":
        """Choose coordinates for the weights of these maps (name -> row type) of a backbone."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in roles:
            layer = backbone.get_submodule(name)
            shapes |= require_kind(layer, name).shapes(layer, name)
        return cls(dict(roles), Sketch(shapes, dimension, seed), last)


def chosen_roles(
    backbone: Backbone, roles: Mapping[str, str], maps: str | Sequence[str]
) -> tuple[dict[str, str], bool]:
    """Return the row types of chosen maps by name, and whether they are (part of) the readout.

    Maps are chosen as "readout", "all", or by patterns of names.
    """
    if maps == ALL:
        return dict(roles), False
    direct = not backbone.conservative and not backbone.readout_maps
    readout = {} if direct and maps != READOUT else readout_roles(backbone, roles)
    if maps == READOUT:
        if not readout:
            raise ConversionError(
                f"{type(backbone).__name__} has no readout: no map acts on atoms after the last "
                'exchange between them; choose maps="all", or patterns of names'
            )
        return readout, True
    known = {**roles, **readout}
    chosen = {name: role for name, role in known.items() if matches(name, maps)}
    if not chosen:
        raise InputError(
            f"no map matches {maps!r}; there are {', '.join(known)}, "
            'and the names "readout" and "all" for many'
        )
    return chosen, chosen.keys() <= readout.keys()


def readout_roles(backbone: Backbone, roles: Mapping[str, str]) -> dict[str, str]:
    """Return the maps after the last exchange between atoms: as declared, else found by trial."""
    if not backbone.readout_maps:
        return _found_readout(backbone, roles)
    return {
        name: role
        for name, layer in backbone.named_modules()
        if isinstance(layer, StochasticMap) or kind_of(layer) is not None
        if (role := first_match(name, backbone.readout_maps))
    }


def _found_readout(backbone: Backbone, roles: Mapping[str, str]) -> dict[str, str]:
    """Find maps on atoms after the last exchange: dE_i/dz_j = 0 for atoms j != i."""
    if not isinstance(backbone, AtomisticBackbone) or not backbone.conservative:
        raise ConversionError(
            f"{type(backbone).__name__} predicts forces directly and does not say which of its "
            "maps are the readout; choose maps by patterns of names"
        )
    on_atoms = [name for name, role in roles.items() if role == keys.NODE]
    with torch.enable_grad(), watched(backbone, on_atoms) as calls:
        energies = backbone(backbone.graph(backbone.examples()))[keys.ENERGIES]
        times = Counter(call.name for call in calls)
        return {
            call.name: keys.NODE
            for call in calls
            if times[call.name] == 1 and _is_of_its_own_row(energies, call.output)
        }


def _is_of_its_own_row(energies: Tensor, z: Tensor) -> bool:
    """Return whether the first energy depends on the first row of z, and on no other."""
    (slope,) = torch.autograd.grad(energies[0], z, retain_graph=True, allow_unused=True)
    return slope is not None and bool(slope[0].any()) and not bool(slope[1:].any())


class Call(NamedTuple):
    """One application of a chosen map, as it ran."""

    name: str
    layer: nn.Module
    h: Tensor
    output: Tensor
    version: int


@contextmanager
def watched(backbone: Backbone, names: Sequence[str]) -> Iterator[list[Call]]:
    """Record inputs and outputs of these maps while they run unchanged, in this thread."""
    calls: list[Call] = []
    here = threading.get_ident()

    def note(name: str, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if threading.get_ident() != here:
            return output
        if not output.requires_grad:  # of frozen weights and constant inputs
            output = output.detach().requires_grad_()
        calls.append(Call(name, layer, args[0], output, output._version))
        return output

    with ExitStack() as stack:
        for name in names:
            layer = backbone.get_submodule(name)
            with _registering:
                hook = layer.register_forward_hook(partial(note, name))
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
        for product in require_kind(call.layer, call.name).products(
            call.layer, call.name, call.h, gradient
        )
    ]
    return products, list(found[len(outputs) :])
