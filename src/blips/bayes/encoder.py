"""The inference network: posterior widths of every row, from the input alone.

One head per row type, evaluated once per input:

    edge   p_ij = silu(P [e_ij, n_i, n_j])             a layer on pairs, shared with the nodes
    node   [n_i, sum_j w_ij p_ij]                      a view of the neighbourhood
    other  whatever the backbone declares for it

with n_i an embedding of the node's label joined to its continuous features, e_ij the edge
features and w_ij an envelope that vanishes at the cutoff. Each head ends in one number x per map,

    coef = least + (largest - least) sigmoid(x)

It is r / (1 - r) of an r that a sigmoid keeps between the values that belong to the bounds (with
another origin of x): a clamp without kinks, so that frozen draws stay smooth, and without dead
gradients. Everything is invariant if the backbone's row features are.
"""

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from blips.errors import InputError, refuse_unknown

EMBEDDING = 16  # width of a node label's


class InferenceNetwork(nn.Module):
    """Coefficients of every Bayesian map, keyed by the map's name.

    `roles` are the row types of maps, by name, and `sizes` the widths of the features of row types;
    "node_type" is the number of labels. Coefficients start from `initial`, within the `bounds`.
    `depth` counts hidden layers (of the edge head, the layer on pairs included); `share` says
    whether each "map" has coefficients, or all maps of a message-passing "layer" have the same.
    """

    sees_neighbours: ClassVar[bool] = True  # nodes, through the layer on pairs

    def __init__(
        self,
        roles: Mapping[str, str],
        sizes: Mapping[str, int],
        *,
        bounds: tuple[float, float],
        initial: float,
        hidden: int = 64,
        depth: int = 2,
        share: str = "map",
    ) -> None:
        super().__init__()
        low, high = self.bounds = bounds
        if not 0.0 < low < high < math.inf:
            raise InputError(f"coefficient bounds {bounds} must satisfy 0 < least < largest")
        if not low <= initial <= high:
            raise InputError(f"the initial coefficient {initial} is outside its bounds {bounds}")
        if depth < 1:
            raise InputError(f"the heads need at least one hidden layer, got depth={depth}")
        refuse_unknown("share", share, ("map", "layer"))
        self.columns = _columns(roles, share)
        labels = sizes.get("node_type", 0)
        self.embedding = nn.Embedding(labels, EMBEDDING) if labels else None
        node_size = sizes.get("node", 0) + (EMBEDDING if labels else 0)
        pair_size = self._pair_input_size(sizes.get("edge", 0), node_size)
        shares_pairs = self.sees_neighbours and not {"edge", "node"}.isdisjoint(self.columns)
        self.pair_layer = mlp(pair_size, hidden).append(nn.SiLU()) if shares_pairs else None
        widths = {role: [size] + [hidden] * depth for role, size in sizes.items()}
        widths["edge"] = [hidden] * depth if shares_pairs else [pair_size] + [hidden] * depth
        widths["node"] = [node_size + (hidden if shares_pairs else 0)] + [hidden] * depth
        fraction = min(max((initial - low) / (high - low), 1e-3), 1.0 - 1e-3)
        self.heads = nn.ModuleDict()
        for role, columns in self.columns.items():
            if not widths.get(role, [0])[0]:
                raise InputError(
                    f"no features are declared for {role!r} rows, but {len(columns)} maps act on "
                    f"them; the backbone declares {sorted(sizes)}"
                )
            head = mlp(*widths[role], 1 + max(columns.values()))
            self.heads[role] = head
            last = cast(nn.Linear, head[-1])  # every row starts near `initial`
            last.weight.data.mul_(0.1)
            nn.init.constant_(last.bias, math.log(fraction / (1.0 - fraction)))

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute coefficients from row features, [rows] for each map name."""
        rows = {**features, **self._edge_and_node_rows(features)}
        coefficients: dict[str, Tensor] = {}
        for role, head in self.heads.items():
            by_column = self.coefficients_of(head(rows[role])).T.contiguous()  # [maps, rows]
            if not bool(torch.isfinite(by_column.sum())):
                raise InputError(
                    f"the inference network gives non-finite coefficients on {role} rows; "
                    "check the positions, or lower the learning rate if this is a training run"
                )
            maps = by_column.unbind()  # one stack backwards, where indexing would be many
            coefficients |= {name: maps[column] for name, column in self.columns[role].items()}
        return coefficients

    def coefficients_of(self, logits: Tensor) -> Tensor:
        """Turn the output of a head's last map into coefficients, element by element."""
        low, high = self.bounds
        return low + (high - low) * torch.sigmoid(logits)

    def _edge_and_node_rows(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of the edge and the node head."""
        known = [self.embedding(features["node_type"])] if self.embedding is not None else []
        node = torch.cat([*known, *([features["node"]] if "node" in features else [])], dim=1)
        if self.pair_layer is None and "edge" not in self.columns:
            return {"node": node}  # [N, D]
        pairs = self._pair_inputs(features, node)  # [E, ...]
        if self.pair_layer is None:
            return {"edge": pairs, "node": node}
        pairs = self.pair_layer(pairs)  # [E, hidden]
        weighted = pairs * features["edge_weight"][:, None]
        seen = pairs.new_zeros(node.shape[0], pairs.shape[1])  # [N, hidden]
        seen = seen.index_add(0, features["edge_index"][0], weighted)
        return {"edge": pairs, "node": torch.cat([node, seen], dim=1)}

    def _pair_input_size(self, edge_size: int, node_size: int) -> int:
        return edge_size + 2 * node_size

    def _pair_inputs(self, features: Mapping[str, Tensor], node: Tensor) -> Tensor:
        """Return the features of every pair, [E, ...]: those of the edge and of both ends."""
        receiver, sender = features["edge_index"]
        ends = (node.index_select(0, receiver), node.index_select(0, sender))
        return torch.cat([features["edge"], *ends], dim=-1)


NETWORKS: dict[str, type[InferenceNetwork]] = {"neighbourhood": InferenceNetwork}
"""Inference networks by the name of their variant, `bayesianize(encoder={"variant": ...})`."""


def mlp(*widths: int, activation: type[nn.Module] = nn.SiLU) -> nn.Sequential:
    """Make linear maps of these widths with activations between them."""
    layers: list[nn.Module] = []
    for size_in, size_out in pairwise(widths):
        layers += [nn.Linear(size_in, size_out), activation()]
    return nn.Sequential(*layers[:-1])


def _columns(roles: Mapping[str, str], share: str) -> dict[str, dict[str, int]]:
    """Return, for each row type, the column of the head's output of each map."""
    columns: dict[str, dict[str, int]] = {}
    groups: dict[str, dict[str, int]] = {}
    for name, role in roles.items():
        # the layer of `blocks.1.message.filter` is `blocks.1`
        group = re.sub(r"(?<=\d)\..*", "", name) if share == "layer" else name
        of_role = groups.setdefault(role, {})
        columns.setdefault(role, {})[name] = of_role.setdefault(group, len(of_role))
    return columns
