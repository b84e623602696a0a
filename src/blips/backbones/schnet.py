r"""SchNet: continuous-filter convolutions, scalar features only.

Schütt, Kindermans, Sauceda, Chmiela, Tkatchenko, Müller, "SchNet: A continuous-filter
convolutional neural network for modeling quantum interactions" (2017). With features x_i and for
each edge the distance r, Gaussians b(r) and envelope f(r), one block is

    x_i += out( sum_j in(x_j) * filter(b(r)) f(r) )

| symbol | variable | rows |
|---|---|---|
| filter | `blocks.*.filter` | edges |
| in | `blocks.*.sender` (no bias) | nodes (the sending atoms) |
| out | `blocks.*.update` | nodes |
| - | `readout` | nodes |

The activation is the shifted softplus log(1 + e^x) - log 2; the readout is shared with PaiNN.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from blips import keys
from blips.backbones.base import (
    MAX_ATOMIC_NUMBER,
    AtomisticBackbone,
    GaussianBasis,
    cosine_cutoff,
    require_positive,
    scatter_sum,
)
from blips.bayes.encoder import mlp
from blips.data.graph import Graph


class SchNet(AtomisticBackbone):
    """Atomic energies from distances within `cutoff` (A) alone; `num_basis` Gaussians of each."""

    roles: ClassVar = {
        "blocks.*.filter.*": keys.EDGE,
        "blocks.*.sender": keys.NODE,
        "blocks.*.update.*": keys.NODE,
        "readout.*": keys.NODE,
    }
    readout_maps: Mapping[str, str] = {"readout.*": keys.NODE}

    def __init__(
        self, cutoff: float = 5.0, features: int = 128, blocks: int = 3, num_basis: int = 20
    ) -> None:
        super().__init__(cutoff, features=features, blocks=blocks, num_basis=num_basis)
        require_positive(features=features // 2)  # half as many in the readout
        self.embedding = nn.Embedding(MAX_ATOMIC_NUMBER + 1, features)
        self.basis = GaussianBasis(num_basis, cutoff)
        self.blocks = nn.ModuleList(SchNetBlock(features, num_basis) for _ in range(blocks))
        self.readout = mlp(features, features // 2, 1)

    def forward(self, graph: Graph) -> dict[str, Tensor]:
        """Compute the energies of the atoms, [N] eV."""
        graph = self._atom_graph(graph)
        distance = graph.vectors().norm(dim=-1)  # [E]
        basis = self.basis(distance)  # [E, B]
        envelope = cosine_cutoff(distance, self.cutoff)[:, None]  # [E, 1]
        features = self.embedding(graph.numbers)  # [N, F]
        for block in self.blocks:
            features = features + block(features, basis, envelope, graph.edge_index)
        energies = self.readout(features).squeeze(-1)  # [N]
        return {keys.ENERGIES: self.reference(energies, graph.numbers)}


class SchNetBlock(nn.Module):
    """Continuous-filter convolution over the neighbours, then an atom-wise network."""

    def __init__(self, features: int, num_basis: int) -> None:
        super().__init__()
        self.filter = mlp(num_basis, features, features, activation=ShiftedSoftplus)
        self.sender = nn.Linear(features, features, bias=False)
        self.update = mlp(features, features, features, activation=ShiftedSoftplus)

    def forward(self, features: Tensor, basis: Tensor, envelope: Tensor, edges: Tensor) -> Tensor:
        """Compute the update of the features, [N, F]."""
        receiver, sender = edges
        filters = self.filter(basis) * envelope  # [E, F]
        messages = filters * self.sender(features).index_select(0, sender)  # [E, F]
        return self.update(scatter_sum(messages, receiver, len(features)))


class ShiftedSoftplus(nn.Module):
    """Log(1 + e^x) - log 2: smooth, and zero at zero."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function elementwise."""
        return F.softplus(x) - math.log(2.0)
