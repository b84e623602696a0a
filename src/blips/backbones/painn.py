r"""PaiNN: equivariant message passing with scalar and vector features.

Schütt, Unke, Gastegger, "Equivariant message passing for the prediction of tensorial properties
and molecular spectra" (2021). With scalars s_i, vectors v_i, and for each edge the distance r,
unit vector u (from i to j), radial basis b(r) and envelope f(r), one block is

    message    g = phi(s_j) * W b(r) f(r),  split into g_s, g_u, g_v
               s_i += sum_j g_s,            v_i += sum_j (g_u u + g_v v_j)
    update     a = gates(s_i, |V v_i|),     split into a_ss, a_sv, a_vv
               s_i += a_ss + a_sv <U v_i, V v_i>,      v_i += a_vv U v_i

| symbol | variable | rows |
|---|---|---|
| phi | `message.sender` | nodes (the sending atoms, before they are gathered onto edges) |
| W | `message.filter` (no bias, so that W b f vanishes at the cutoff) | edges |
| U, V | `update.mixing`, one map with both outputs | nodes, with an irrep axis [N, 3, F] |
| a | `update.gates` | nodes |
| - | `readout` | nodes |

Vectors start at zero and only scalars are read out, so the first block has no g_v and the last
no a_vv: the same function as with them, without maps that never see data.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from blips import keys
from blips.backbones._fast import CompiledMessages, is_for_compiled
from blips.backbones.base import (
    MAX_ATOMIC_NUMBER,
    AtomisticBackbone,
    cosine_cutoff,
    require_positive,
    scatter_sum,
)
from blips.bayes.encoder import mlp
from blips.data.graph import Graph

NORM_SMOOTHING = 1e-6  # |v| = sqrt(v^2 + this): curvature at most 1e3, offset 1e-3


class PaiNN(AtomisticBackbone):
    """Atomic energies from messages of F = `features` scalars and vectors within `cutoff` (A)."""

    roles: ClassVar = {
        "blocks.*.message.filter": keys.EDGE,
        "blocks.*.message.sender.*": keys.NODE,
        "blocks.*.update.mixing": keys.NODE,
        "blocks.*.update.gates.*": keys.NODE,
        "readout.*": keys.NODE,
    }
    readout_maps: Mapping[str, str] = {"readout.*": keys.NODE}

    def __init__(
        self, cutoff: float = 5.0, features: int = 128, blocks: int = 3, num_basis: int = 16
    ) -> None:
        super().__init__(cutoff, features=features, blocks=blocks, num_basis=num_basis)
        require_positive(features=features // 2)  # half as many in the readout
        self.embedding = nn.Embedding(MAX_ATOMIC_NUMBER + 1, features)
        self.basis = BesselBasis(num_basis, cutoff)
        self.blocks = nn.ModuleList(
            PaiNNBlock(features, num_basis, first=k == 0, last=k == blocks - 1)
            for k in range(blocks)
        )
        self.readout = mlp(features, features // 2, 1)

    def forward(self, graph: Graph) -> dict[str, Tensor]:
        """Compute the energies of the atoms, [N] eV."""
        graph = self._atom_graph(graph)
        edge_vectors = graph.vectors()  # [E, 3]
        distance = edge_vectors.norm(dim=-1)  # [E]
        basis = self.basis(distance) * cosine_cutoff(distance, self.cutoff)[:, None]  # b f, [E, B]
        unit = edge_vectors / distance[:, None]  # [E, 3]

        scalars = self.embedding(graph.numbers)  # [N, F]
        vectors = None  # [N, 3, F]
        for block in self.blocks:
            scalars, vectors = block(scalars, vectors, basis, unit, graph.edge_index)
        energies = self.readout(scalars).squeeze(-1)  # [N]
        return {keys.ENERGIES: self.reference(energies, graph.numbers)}


class BesselBasis(nn.Module):
    """b_n(r) = sin(n pi r / rc) / r, n = 1..B (DimeNet, PaiNN)."""

    frequencies: Tensor

    def __init__(self, num_basis: int, cutoff: float) -> None:
        super().__init__()
        frequencies = math.pi / cutoff * torch.arange(1, num_basis + 1, dtype=torch.float64)
        self.register_buffer("frequencies", frequencies.to(torch.get_default_dtype()))

    def forward(self, distance: Tensor) -> Tensor:
        """Evaluate the basis, [E] A -> [E, B] 1/A."""
        distance = distance[:, None]
        return torch.sin(self.frequencies * distance) / distance


class PaiNNBlock(nn.Module):
    """One message from the neighbours, then one update of every atom on its own."""

    def __init__(self, features: int, num_basis: int, *, first: bool, last: bool) -> None:
        super().__init__()
        self.message = PaiNNMessage(features, num_basis, vectors_in=not first)
        self.update = PaiNNUpdate(features, vectors_out=not last)

    def forward(
        self, scalars: Tensor, vectors: Tensor | None, basis: Tensor, unit: Tensor, edges: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Update [N, F] and [N, 3, F] (None for zero) with messages from the neighbours."""
        return self.update(*self.message(scalars, vectors, basis, unit, edges))


class PaiNNMessage(nn.Module):
    """Sum over neighbours of filtered scalars, unit vectors and vectors."""

    def __init__(self, features: int, num_basis: int, *, vectors_in: bool) -> None:
        super().__init__()
        parts = 3 if vectors_in else 2
        self.sender = mlp(features, features, parts * features)
        self.filter = nn.Linear(num_basis, parts * features, bias=False)

    def forward(
        self, scalars: Tensor, vectors: Tensor | None, basis: Tensor, unit: Tensor, edges: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute scalars [N, F] and vectors [N, 3, F] after the message."""
        sent, *gate = self.sender(scalars).split(2 * scalars.shape[1], dim=1)  # [N, 2F], [N, F]
        # g_v v_j = (W b f) (phi v)_j: the inner product on atoms, which are fewer than edges
        carried = None if vectors is None else gate[0][:, None] * vectors  # [N, 3, F]
        filters = self.filter(basis)  # [E, 2F or 3F]
        to_scalars, to_vectors = summed_messages(filters, sent, carried, unit, edges)
        return scalars + to_scalars, to_vectors if vectors is None else vectors + to_vectors


def summed_messages(
    filters: Tensor, sent: Tensor, carried: Tensor | None, unit: Tensor, edges: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum over edges what all atoms receive: scalars [N, F] and vectors [N, 3, F].

        scalars_i = sum_j f0 s0_j,    vectors_i = sum_j (f1 s1_j u + f2 carried_j)

    with f0, f1 (and f2 where vectors are carried) in `filters` [E, 2F or 3F], s0 and s1 in `sent`
    [N, 2F], u in `unit` [E, 3], and receivers i and senders j in `edges` [2, E].
    """
    if is_for_compiled(filters):
        return CompiledMessages.apply(filters, sent, carried, unit, edges)
    receiver, sender = edges
    atoms, width = sent.shape[0], sent.shape[1] // 2
    direct, *gate = filters.split(2 * width, dim=1)  # [E, 2F], [E, F]
    to_scalars, along_unit = (direct * sent.index_select(0, sender)).split(width, dim=1)  # [E, F]
    to_vectors = along_unit[:, None] * unit[:, :, None]  # [E, 3, F]
    if carried is not None:
        to_vectors = to_vectors + gate[0][:, None] * carried.index_select(0, sender)
    return scatter_sum(to_scalars, receiver, atoms), scatter_sum(to_vectors, receiver, atoms)


class PaiNNUpdate(nn.Module):
    """Exchange between the scalars and the vectors of one atom."""

    def __init__(self, features: int, *, vectors_out: bool) -> None:
        super().__init__()
        self.vectors_out = vectors_out
        self.mixing = nn.Linear(features, 2 * features, bias=False)
        self.gates = mlp(2 * features, features, (3 if vectors_out else 2) * features)

    def forward(self, scalars: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        """Update scalars [N, F] and vectors [N, 3, F]; the last block returns no vectors."""
        mixed_u, mixed_v = self.mixing(vectors).chunk(2, dim=-1)  # [N, 3, F]
        norm = (mixed_v.square().sum(dim=1) + NORM_SMOOTHING).sqrt()  # [N, F]
        gates = self.gates(torch.cat([scalars, norm], dim=1))  # [N, 2F or 3F]
        to_scalars, product_gate, *vector_gate = gates.split(scalars.shape[1], dim=1)  # [N, F]
        scalars = scalars + to_scalars + product_gate * (mixed_u * mixed_v).sum(dim=1)
        if not self.vectors_out:
            return scalars, None
        return scalars, vectors + vector_gate[0][:, None] * mixed_u
