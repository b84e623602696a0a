"""The inference networks of the paper's experiments, by the names of their variants.

| variant | edges are described by | nodes |
|---|---|---|
| paper-nbody | edge features and both ends | see their label and features alone |
| paper-ammonia | the squared distance | the same |
| paper-silica | direction and edge features: not invariant | the same |

The last two need "edge_vector" among a backbone's row features. `bayesianize(encoder={"variant":
...})` and checkpoints know them once this module is imported.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import normalize

from blips import keys
from blips.bayes.encoder import NETWORKS, InferenceNetwork
from blips.errors import InputError


class NBodyNetwork(InferenceNetwork):
    """Nodes do not see their neighbours."""

    sees_neighbours = False


class AmmoniaNetwork(NBodyNetwork):
    """Edges by their squared distance alone."""

    def _pair_input_size(self, edge_size: int, node_size: int) -> int:
        return 1

    def _pair_inputs(self, features: Mapping[str, Tensor], node: Tensor) -> Tensor:
        return _edge_vectors(features).square().sum(-1, keepdim=True)


class SilicaNetwork(NBodyNetwork):
    """Edges by direction and radial basis."""

    def _pair_input_size(self, edge_size: int, node_size: int) -> int:
        return 3 + edge_size

    def _pair_inputs(self, features: Mapping[str, Tensor], node: Tensor) -> Tensor:
        direction = normalize(_edge_vectors(features), dim=-1)
        return torch.cat([direction, features[keys.EDGE]], dim=-1)


def _edge_vectors(features: Mapping[str, Tensor]) -> Tensor:
    if keys.EDGE_VECTOR not in features:
        raise InputError("this network needs edge vectors, which the backbone does not declare")
    return features[keys.EDGE_VECTOR]


NETWORKS["paper-nbody"] = NBodyNetwork
NETWORKS["paper-ammonia"] = AmmoniaNetwork
NETWORKS["paper-silica"] = SilicaNetwork
