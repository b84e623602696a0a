r"""A graph network without symmetry: where charged particles will be, from raw coordinates.

The non-equivariant baseline of the n-body experiment of Satorras, Hoogeboom, Welling, "E(n)
Equivariant Graph Neural Networks" (2021). With h_i = embedding(x_i, v_i) and a_ij = (q_i q_j,
squared distance), one layer is

    m_ij = phi_e(h_i, h_j, a_ij),    h_i += phi_h(h_i, sum_j m_ij)

and the prediction is decoder(h_i), the position itself.

| symbol | variable | rows | Bayesian by default |
|---|---|---|---|
| phi_e | `layers.*.message` | edges | yes |
| phi_h | `layers.*.update` | nodes | yes |
| - | `embedding` | nodes | no |
| - | `decoder` | nodes | no |
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from blips import keys
from blips.backbones.base import require_positive, scatter_sum
from blips.bayes.encoder import mlp
from blips.data.graph import Graph
from studies.nbody.data import POSITIONS
from studies.nbody.particles import (
    EDGE_ATTRIBUTES,
    ParticleBackbone,
    edge_attributes,
    pair_rows,
)


class GNN(ParticleBackbone):
    """Prediction of future positions that does not know about rotations.

    Args:
        hidden: width of the node features and messages.
        layers: number of message-passing layers.
    """

    roles: ClassVar = {
        "layers.*.message.*": keys.EDGE,
        "layers.*.update.*": keys.NODE,
    }

    def __init__(self, hidden: int = 64, layers: int = 4) -> None:
        super().__init__()
        require_positive(hidden=hidden, layers=layers)
        self.hyperparameters = {"hidden": hidden, "layers": layers}
        self.embedding = nn.Linear(6, hidden)
        self.layers = nn.ModuleList(GNNLayer(hidden) for _ in range(layers))
        self.decoder = mlp(hidden, hidden, 3)

    def forward(self, graph: Graph) -> dict[str, Tensor]:
        """Predict future positions, [N, 3]."""
        graph = self._particle_graph(graph)
        attributes = edge_attributes(graph)  # [E, 2]
        hidden = self.embedding(torch.cat([graph.positions, graph.velocities], dim=1))  # [N, H]
        for layer in self.layers:
            hidden = layer(hidden, attributes, graph.edge_index)
        return {POSITIONS: self.decoder(hidden)}


class GNNLayer(nn.Module):
    """One exchange of messages."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.message = mlp(2 * hidden + EDGE_ATTRIBUTES, hidden, hidden).append(nn.SiLU())
        self.update = mlp(2 * hidden, hidden, hidden)

    def forward(self, hidden: Tensor, attributes: Tensor, edges: Tensor) -> Tensor:
        """Compute features [N, H] after the layer."""
        messages = self.message(pair_rows(hidden, attributes, edges))  # [E, H]
        received = scatter_sum(messages, edges[0], len(hidden))  # [N, H]
        return hidden + self.update(torch.cat([hidden, received], dim=1))
