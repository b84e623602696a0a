"""Coefficients of one structure with their slopes: the inference network once for K samples.

A pair of atoms tells the network its distance r alone. The widths of an edge depend on its own r,
those of a node on the r of all edges that it receives, each of which meets no other node. So one
number per edge and map,

    slope_e = d coef_row / d r_e,    row = e, or the node that e ends at,

is the whole Jacobian. It is carried along with the values (forward mode), and K samples get their
gradients from it as products.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from blips.bayes.encoder import InferenceNetwork
from blips.bayes.shared import with_slope


@dataclass(frozen=True)
class _Role:
    """Coefficients of all maps on one type of rows.

    Attributes:
        coef: [maps, rows].
        slope: [maps, E].
        row_of_edge: the row that each edge acts on, [E]; None where it is its own.
    """

    coef: Tensor
    slope: Tensor
    row_of_edge: Tensor | None


class SharedCoefficients:
    """Coefficients of a structure, as functions of the lengths in every sample of it.

    Args:
        encoder: see `has_slopes`.
        features: row features of the structure.
        edge_slope: derivatives of features["edge"] by the lengths, [E, B].
        weight_slope: derivatives of features["edge_weight"], [E].
    """

    def __init__(
        self,
        encoder: InferenceNetwork,
        features: Mapping[str, Tensor],
        edge_slope: Tensor,
        weight_slope: Tensor,
    ) -> None:
        self._columns = encoder.columns
        with torch.no_grad():
            self._roles = _roles(encoder, features, edge_slope, weight_slope)

    def at(self, length: Tensor, samples: int) -> dict[str, Tensor]:
        """[K * E] lengths of K samples -> [K * rows] for each map name."""
        found: dict[str, Tensor] = {}
        for name, role in self._roles.items():
            inputs = (length, samples, role.coef, role.slope, role.row_of_edge)
            maps = cast(Tensor, _Repeated.apply(*inputs)).unbind()  # pyright: ignore
            found |= {map_name: maps[column] for map_name, column in self._columns[name].items()}
        return found


def has_slopes(encoder: InferenceNetwork) -> bool:
    """Whether the lengths of edges are all that the network sees of the geometry."""
    return encoder.pair_layer is not None and set(encoder.columns) <= {"edge", "node"}


def _roles(
    encoder: InferenceNetwork,
    features: Mapping[str, Tensor],
    edge_slope: Tensor,
    weight_slope: Tensor,
) -> dict[str, _Role]:
    receiver = features["edge_index"][0]
    weight = features["edge_weight"][:, None]  # [E, 1]
    node = encoder.node_features(features)
    linear, activation = cast(nn.Sequential, encoder.pair_layer)
    before = linear(encoder.pair_inputs(features, node))  # [E, H]
    pairs = activation(before)
    rows = encoder.rows_of_pairs(features, node, pairs)
    by_edge = cast(Tensor, linear.weight)[:, : edge_slope.shape[1]]  # its first columns
    pair_slope = F.linear(edge_slope, by_edge) * _silu_slope(before)  # [E, H]
    seen_slope = pair_slope * weight + pairs * weight_slope[:, None]  # [E, H]

    found: dict[str, _Role] = {}
    for name, head in encoder.heads.items():
        of_edge = name == "edge"
        row_of_edge = None if of_edge else receiver
        slope = pair_slope if of_edge else seen_slope  # by the last columns of the row
        value, slope = _through(cast(nn.Sequential, head), rows[name], slope, row_of_edge)
        coef, coef_slope = with_slope(encoder.coefficients_of, value)
        encoder.check_finite(name, coef)
        slope = slope * _of_edges(coef_slope, row_of_edge)
        found[name] = _Role(coef.T.contiguous(), slope.T.contiguous(), row_of_edge)
    return found


def _through(
    head: nn.Sequential, x: Tensor, slope: Tensor, row_of_edge: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output of a head, [rows, maps], and its derivatives by the edges of the rows, [E, maps].

    Args:
        head: linear maps with SiLU between them.
        x: [rows, D].
        slope: derivatives of the last columns of x by the lengths, [E, H].
        row_of_edge: see `_Role`.
    """
    slope = F.pad(slope, (x.shape[1] - slope.shape[1], 0))
    for layer in head:
        if isinstance(layer, nn.Linear):
            x, slope = layer(x), F.linear(slope, layer.weight)
        else:
            x, slope = layer(x), slope * _of_edges(_silu_slope(x), row_of_edge)
    return x, slope


def _silu_slope(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return gate * (1.0 + x * (1.0 - gate))


def _of_edges(rows: Tensor, row_of_edge: Tensor | None) -> Tensor:
    return rows if row_of_edge is None else rows.index_select(0, row_of_edge)


class _Repeated(Function):
    """The coefficients of every sample, [maps, K * rows]."""

    @staticmethod
    def forward(
        ctx: Any,
        length: Tensor,
        samples: int,
        coef: Tensor,
        slope: Tensor,
        row_of_edge: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(slope, row_of_edge)
        ctx.samples = samples
        return coef.repeat(1, samples)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        slope, row_of_edge = ctx.saved_tensors
        by_row = grads[0].view(
            len(slope), ctx.samples, grads[0].shape[1] // ctx.samples
        )  # [maps, K, rows]
        by_edge = by_row if row_of_edge is None else by_row.index_select(2, row_of_edge)
        return (by_edge * slope[:, None]).sum(0).flatten(), *(None,) * 4
