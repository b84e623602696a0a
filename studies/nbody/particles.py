"""What models of charged particles share: the description of their rows."""

import torch
from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone
from blips.data.graph import Graph
from blips.errors import InputError
from studies.nbody.data import ParticleGraph

EDGE_ATTRIBUTES = 2  # q_i q_j and |x_i - x_j|^2 of the given positions
NODE_ATTRIBUTES = 1  # |v|


class ParticleBackbone(Backbone):
    """A model that predicts where particles will be: `ParticleGraph` -> positions [N, 3]."""

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Charge product and squared distance on edges; speed on nodes."""
        return {keys.EDGE: EDGE_ATTRIBUTES, keys.NODE: NODE_ATTRIBUTES}

    def row_features(self, graph: Graph) -> dict[str, Tensor]:
        """Return invariant features of edges and nodes, also for models that are not invariant."""
        graph = self._particle_graph(graph)
        return {
            keys.EDGE: edge_attributes(graph),  # [E, 2]
            keys.EDGE_WEIGHT: graph.positions.new_ones(graph.num_edges),  # [E], no cutoff
            keys.EDGE_INDEX: graph.edge_index,  # [2, E]
            keys.NODE: speeds(graph),  # [N, 1]
        }

    def _particle_graph(self, graph: Graph) -> ParticleGraph:
        """Return the graph; raise an error if it is not one of particles."""
        if not isinstance(graph, ParticleGraph):
            raise InputError(
                f"{type(self).__name__} needs a ParticleGraph, got {type(graph).__name__}; "
                "make one with ParticleGraph.from_arrays"
            )
        return graph


def edge_attributes(graph: ParticleGraph) -> Tensor:
    """Compute charge product q_i q_j and squared distance of each pair, [E, 2]."""
    receiver, sender = graph.edge_index
    charge_product = graph.charges.index_select(0, receiver) * graph.charges.index_select(0, sender)
    squared_distance = graph.vectors().square().sum(dim=1)  # [E]
    return torch.stack([charge_product, squared_distance], dim=1)


def speeds(graph: ParticleGraph) -> Tensor:
    """Compute |v| of each particle, [N, 1]."""
    return graph.velocities.norm(dim=1, keepdim=True)


def pair_rows(node: Tensor, pair: Tensor, edges: Tensor) -> Tensor:
    """Concatenate [a_i, a_j, c_ij] of nodes a [N, H] and pairs c [E, C], [E, 2 H + C]."""
    receiver, sender = edges
    return torch.cat([node.index_select(0, receiver), node.index_select(0, sender), pair], dim=1)
