"""Features that the readout of a potential sees, and their derivatives.

The energy of an atom is linear in its last-layer features f_i, so that of a structure is linear in
Phi = sum_i f_i, and forces are linear in dPhi/dr:

    E = w . Phi + const,    F = -w . dPhi/dr
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from blips import keys
from blips.backbones.base import AtomisticBackbone, Backbone
from blips.backbones.derivatives import first_derivatives_only
from blips.data.graph import AtomGraph, Graph
from blips.errors import InputError

FEW_ROWS = 2000  # edges times gradients up to which one batched backward pass is the cheaper


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
    """Return the factor of the readout's output, eV."""
    is_potential = isinstance(backbone, AtomisticBackbone)
    return backbone.reference.scale if is_potential else torch.ones(())


def last_layer(backbone: Backbone, graph: Graph) -> tuple[Tensor, Tensor]:
    """Compute energies [N] eV and last-layer features [N, D] of the atoms, differentiable."""
    with inputs_of(readout_of(backbone)[-1]) as seen:
        energies = backbone(graph)[keys.ENERGIES]
    return energies, seen[-1]


def gradient_of_each(
    values_of: Callable[[AtomGraph], Tensor],
    graph: Graph,
    count: int,
    *,
    create_graph: bool = False,
) -> Tensor:
    """Differentiate `count` sums over all atoms by the positions, [M, N, 3].

    The graph of one forward pass serves M backward passes. On the smallest graphs they run as one
    batch, which saves Python's overhead; on others that would miss the cache and the compiled
    first derivatives, and take M times the memory. `values_of` gives the sums [M] of a graph and is
    called once; `create_graph` keeps what is needed to differentiate the gradients (training).
    """
    if not isinstance(graph, AtomGraph):
        raise InputError(f"a potential needs an AtomGraph, got {type(graph).__name__}")
    together = count * graph.num_edges <= FEW_ROWS
    with torch.enable_grad():
        leaf = replace(graph, positions=graph.positions.detach().requires_grad_())
        with first_derivatives_only(not create_graph and not together):
            values = values_of(leaf)
        choices = torch.eye(count, dtype=values.dtype, device=values.device)

        def gradient(chosen: Tensor) -> Tensor:
            return torch.autograd.grad(
                values,
                leaf.positions,
                chosen,
                retain_graph=True,
                create_graph=create_graph,
                is_grads_batched=chosen.ndim > 1,
                materialize_grads=True,  # an isolated atom feels nothing
            )[0]

        return gradient(choices) if together else torch.stack([gradient(row) for row in choices])


def summed_features(
    backbone: Backbone, graph: Graph, *, gradients: bool = True
) -> tuple[Tensor, Tensor]:
    """Sum features over structures: Phi [S, D], and dPhi/dr of each component, [N, 3, D]; float64.

    Without `gradients`, which cost a backward pass for each feature, the latter is empty.
    """
    features: list[Tensor] = []  # [N, D]

    def sums(graph: Graph) -> Tensor:
        features.append(last_layer(backbone, graph)[1])
        return features[0].sum(dim=0)

    gradient = torch.zeros(0, 0, 0)
    if gradients:
        count = int(readout_of(backbone)[-1].in_features)  # type: ignore[arg-type]
        gradient = gradient_of_each(sums, graph, count)  # [D, N, 3]
    else:
        with torch.no_grad():
            sums(graph)
    summed = graph.sum_over_structures(features[0].detach().double())
    return summed, gradient.double().permute(1, 2, 0)


@contextmanager
def inputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of `module` in the block, one for each call of this thread."""
    seen: list[Tensor] = []
    here = threading.get_ident()

    def note(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if threading.get_ident() == here:
            seen.append(args[0])

    handle = module.register_forward_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()
