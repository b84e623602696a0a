"""Which maps are conditioned: the readout of a backbone, all Bayesian maps, or some by name."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from blips import keys
from blips.backbones.base import AtomisticBackbone, Backbone
from blips.bayes.linear import StochasticMap, kind_of
from blips.errors import ConversionError, InputError

READOUT, ALL = "readout", "all"


def chosen_roles(
    backbone: Backbone, roles: Mapping[str, str], maps: str | Sequence[str]
) -> tuple[dict[str, str], bool]:
    """Row types of the chosen maps by name, and whether they are (part of) the readout.

    Args:
        backbone: the model.
        roles: row types of its Bayesian maps.
        maps: "readout", "all", or patterns of names.
    """
    if maps == ALL:
        return dict(roles), False
    readout = readout_roles(backbone, roles)
    if maps == READOUT:
        if not readout:
            raise ConversionError(
                f"{type(backbone).__name__} has no readout: no map acts on atoms after the last "
                'exchange between them; choose maps="all", or patterns of names'
            )
        return readout, True
    patterns = [maps] if isinstance(maps, str) else list(maps)
    known = {**roles, **readout}
    chosen = {
        name: role
        for name, role in known.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    if not chosen:
        raise InputError(
            f"no map matches {', '.join(patterns)}; there are {', '.join(known)}, "
            'and the names "readout" and "all" for many'
        )
    return chosen, chosen.keys() <= readout.keys()


def readout_roles(backbone: Backbone, roles: Mapping[str, str]) -> dict[str, str]:
    """The maps after the last exchange between atoms: as declared, else found by trial."""
    if not backbone.readout_maps:
        return _found_readout(backbone, roles)
    return {
        name: role
        for name, layer in backbone.named_modules()
        for pattern, role in backbone.readout_maps.items()
        if fnmatchcase(name, pattern) and _is_linear(layer)
    }


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, StochasticMap) or kind_of(layer) is not None


def _found_readout(backbone: Backbone, roles: Mapping[str, str]) -> dict[str, str]:
    """Maps on atoms to whose outputs z the energy is a sum over atoms, d^2E / dz_i dz_j = 0."""
    if not isinstance(backbone, AtomisticBackbone) or not backbone.conservative:
        raise ConversionError(
            f"{type(backbone).__name__} predicts forces directly and does not say which of its "
            "maps are the readout; choose maps by patterns of names"
        )
    graph = backbone.graph(backbone.examples())
    outputs: dict[str, list[Tensor]] = {}
    handles = [
        backbone.get_submodule(name).register_forward_hook(
            lambda _layer, _args, z, name=name: outputs.setdefault(name, []).append(z)  # pyright: ignore[reportArgumentType]
        )
        for name, role in roles.items()
        if role == keys.NODE
    ]
    try:
        with torch.enable_grad():
            energy = backbone(graph)[keys.ENERGIES].sum()
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: keys.NODE
        for name, found in outputs.items()
        if len(found) == 1 and _is_sum_over_rows(energy, found[0])
    }


def _is_sum_over_rows(energy: Tensor, z: Tensor) -> bool:
    (slope,) = torch.autograd.grad(energy, z, create_graph=True, allow_unused=True)
    if slope is None or slope.shape[0] < 2:
        return False
    if not slope.requires_grad:
        return True  # the energy is linear in z
    weights = torch.linspace(0.5, 1.5, slope[0].numel()).to(slope).view_as(slope[0])
    (mixed,) = torch.autograd.grad(
        (slope[0] * weights).sum(), z, retain_graph=True, materialize_grads=True
    )
    return not bool(mixed[1:].any())
