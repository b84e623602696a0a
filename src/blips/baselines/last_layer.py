"""Features that the readout of a potential sees, and their derivatives.

The energy of an atom is linear in its last-layer features f_i, so that of a structure is linear in
Phi = sum_i f_i, and forces are linear in dPhi/dr:

    E = w . Phi + const,    F = -w . dPhi/dr
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blips import keys
from blips.backbones.base import AtomisticBackbone, Backbone
from blips.data.graph import AtomGraph, Graph
from blips.errors import InputError

CHUNK = 32  # gradients at once


class LastLayer(NamedTuple):
    """Energies of the atoms, and the features that they are linear in."""

    energies: Tensor  # [N] eV
    features: Tensor  # [N, D]


def readout_of(backbone: Backbone) -> nn.Sequential:
    """Find the network from an atom's embedding to its energy, whose last map is linear."""
    readout = getattr(backbone, "readout", None)
    linear = isinstance(readout, nn.Sequential) and isinstance(readout[-1], nn.Linear)
    if not (isinstance(backbone, AtomisticBackbone) and linear):
        raise InputError(
            f"{type(backbone).__name__} has no `readout` network of atomic energies, ending in a "
            "linear map; use a potential such as PaiNN or SchNet"
        )
    return readout  # type: ignore[return-value]


def energy_scale(backbone: Backbone) -> Tensor:
    """Give the factor of the readout's output, eV."""
    is_potential = isinstance(backbone, AtomisticBackbone)
    return backbone.reference.scale if is_potential else torch.ones(())


def embeddings(backbone: Backbone, graph: Graph) -> Tensor:
    """Compute the readout's input for each atom, [N, F], without autograd's graph."""
    with torch.no_grad(), inputs_of(readout_of(backbone)) as seen:
        backbone(graph)
    return seen[-1]


def last_layer(backbone: Backbone, graph: Graph) -> LastLayer:
    """Compute energies and last-layer features of each atom, differentiable."""
    with inputs_of(readout_of(backbone)[-1]) as seen:
        energies = backbone(graph)[keys.ENERGIES]
    return LastLayer(energies, seen[-1])


def with_leaf_positions(graph: Graph) -> AtomGraph:
    """Copy the graph with positions that gradients are taken by."""
    if not isinstance(graph, AtomGraph):
        raise InputError(f"a potential needs an AtomGraph, got {type(graph).__name__}")
    return replace(graph, positions=graph.positions.detach().requires_grad_())


def gradient_of_each(values: Tensor, positions: Tensor, *, create_graph: bool = False) -> Tensor:
    """Differentiate values [M] by positions, [M, N, 3], in batched backward passes."""
    choices = torch.eye(len(values), dtype=values.dtype, device=values.device).split(CHUNK)
    gradients = []
    for number, chosen in enumerate(choices, start=1):
        (gradient,) = torch.autograd.grad(
            values,
            positions,
            chosen,
            retain_graph=create_graph or number < len(choices),
            create_graph=create_graph,
            is_grads_batched=True,
        )
        gradients.append(gradient)
    return torch.cat(gradients)


def summed_features(
    backbone: Backbone, graph: Graph, *, gradients: bool = True
) -> tuple[Tensor, Tensor]:
    """Sum features over structures: Phi [S, D], and dPhi/dr of each component, [N, 3, D]; float64.

    Without `gradients`, which cost a backward pass for each feature, the latter is empty.
    """
    with torch.enable_grad() if gradients else torch.no_grad():
        leaf = with_leaf_positions(graph)
        features = last_layer(backbone, leaf).features  # [N, D]
        gradient = features.new_zeros(0, 0, 0)
        if gradients:
            gradient = gradient_of_each(features.sum(0), leaf.positions)  # [D, N, 3]
    summed = graph.sum_over_structures(features.detach().double())
    return summed, gradient.double().permute(1, 2, 0)


@contextmanager
def inputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of `module` in the block, one for each call."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    try:
        yield seen
    finally:
        handle.remove()
