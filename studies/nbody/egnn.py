r"""EGNN with velocities: where charged particles will be, equivariant to rotation and translation.

Satorras, Hoogeboom, Welling, "E(n) Equivariant Graph Neural Networks" (2021), the variant of its
n-body experiment. With x and v the given positions and velocities, h_i = embedding(|v_i|), and
a_ij = (q_i q_j, squared distance of the given positions), one layer is

    m_ij = phi_e(h_i, h_j, |x_i - x_j|^2, a_ij)
    x_i += mean_j (x_i - x_j) phi_x(m_ij) + phi_v(h_i) v_i
    h_i += phi_h(h_i, sum_j m_ij)

The velocity is the given one in every layer.

| symbol | variable | rows | Bayesian by default |
|---|---|---|---|
| phi_e | `layers.*.message` | edges | yes |
| phi_x | `layers.*.coordinate` | edges | yes |
| phi_v | `layers.*.velocity` | nodes | yes |
| phi_h | `layers.*.update` | nodes | yes |
| - | `embedding` | nodes | no |

Only positions leave the model, so the last layer has no phi_h.
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
    NODE_ATTRIBUTES,
    ParticleBackbone,
    edge_attributes,
    pair_rows,
    speeds,
)

COORDINATE_GAIN = 1e-3  # of the last map of phi_x: the untrained model barely moves particles


class EGNN(ParticleBackbone):
    """Equivariant prediction of future positions.

    Args:
        hidden: width of the node features and messages.
        layers: number of message-passing layers.
    """

    roles: ClassVar = {
        "layers.*.message.*": keys.EDGE,
        "layers.*.coordinate.*": keys.EDGE,
        "layers.*.velocity.*": keys.NODE,
        "layers.*.update.*": keys.NODE,
    }

    def __init__(self, hidden: int = 64, layers: int = 4) -> None:
        super().__init__()
        require_positive(hidden=hidden, layers=layers)
        self.hyperparameters = {"hidden": hidden, "layers": layers}
        self.embedding = nn.Linear(NODE_ATTRIBUTES, hidden)
        self.layers = nn.ModuleList(EGNNLayer(hidden, last=k == layers - 1) for k in range(layers))

    def forward(self, graph: Graph) -> dict[str, Tensor]:
        """Predict future positions, [N, 3]."""
        graph = self._particle_graph(graph)
        edges = graph.edge_index
        attributes = edge_attributes(graph)  # [E, 2]
        neighbours = torch.bincount(edges[0], minlength=graph.num_nodes)  # [N]
        per_neighbour = 1.0 / neighbours.clamp(min=1).to(attributes.dtype)[:, None]  # [N, 1]
        hidden = self.embedding(speeds(graph))  # [N, H]
        positions = graph.positions  # [N, 3]
        for layer in self.layers:
            hidden, positions = layer(
                hidden, positions, graph.velocities, attributes, edges, per_neighbour
            )
        return {POSITIONS: positions}


class EGNNLayer(nn.Module):
    """One exchange of messages, and the move of the particles that follows from it."""

    def __init__(self, hidden: int, *, last: bool) -> None:
        super().__init__()
        inputs = 2 * hidden + 1 + EDGE_ATTRIBUTES
        self.message = mlp(inputs, hidden, hidden).append(nn.SiLU())
        self.coordinate = nn.Sequential(
            nn.Linear(hidden, hidden), nn.SiLU(), _small_map(hidden, COORDINATE_GAIN)
        )
        self.velocity = mlp(hidden, hidden, 1)
        self.update = None if last else mlp(2 * hidden, hidden, hidden)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        velocities: Tensor,
        attributes: Tensor,
        edges: Tensor,
        per_neighbour: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute features [N, H] and positions [N, 3] after the layer."""
        receiver, sender = edges
        away = positions.index_select(0, receiver) - positions.index_select(0, sender)  # [E, 3]
        pairs = torch.cat([away.square().sum(dim=1, keepdim=True), attributes], dim=1)  # [E, 3]
        messages = self.message(pair_rows(hidden, pairs, edges))  # [E, H]
        pushes = scatter_sum(away * self.coordinate(messages), receiver, len(positions))  # [N, 3]
        positions = positions + per_neighbour * pushes + self.velocity(hidden) * velocities
        if self.update is not None:
            received = scatter_sum(messages, receiver, len(hidden))  # [N, H]
            hidden = hidden + self.update(torch.cat([hidden, received], dim=1))
        return hidden, positions


def _small_map(inputs: int, gain: float) -> nn.Linear:
    """Make a linear map to one number, without bias, with small initial weights."""
    linear = nn.Linear(inputs, 1, bias=False)
    nn.init.xavier_uniform_(linear.weight, gain=gain)
    return linear
