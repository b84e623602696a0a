"""Bonds of structures, and the tensors that are made of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from blips.data.graph import AtomGraph


@dataclass(frozen=True)
class Geometry:
    """Neighbours of every atom: unit vectors [E, 3], distances [E]."""

    unit: Tensor
    distance: Tensor
    receiver: Tensor
    sender: Tensor
    num_atoms: int

    @classmethod
    def of(cls, graph: AtomGraph) -> Self:
        """Those of the graph's edges."""
        vectors = graph.vectors().detach().double()
        distance = torch.linalg.vector_norm(vectors, dim=1)
        unit = vectors / distance.clamp_min(1e-6)[:, None]
        receiver, sender = graph.edge_index
        return cls(unit, distance, receiver, sender, graph.num_nodes)

    def within(self, cutoff: float) -> Self:
        """Those shorter than `cutoff` (A)."""
        near = self.distance < cutoff
        ends = self.receiver[near], self.sender[near]
        return type(self)(self.unit[near], self.distance[near], *ends, self.num_atoms)

    def to(self, dtype: torch.dtype) -> Self:
        """With numbers of that type."""
        return replace(self, unit=self.unit.to(dtype), distance=self.distance.to(dtype))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Those of several structures, with atoms numbered on."""
        first = [0, *accumulate(part.num_atoms for part in parts)]
        return cls(
            torch.cat([part.unit for part in parts]),
            torch.cat([part.distance for part in parts]),
            torch.cat([part.receiver + k for part, k in zip(parts, first, strict=False)]),
            torch.cat([part.sender + k for part, k in zip(parts, first, strict=False)]),
            first[-1],
        )

    def window(self, a: float) -> Tensor:
        """W of each edge, [E]."""
        return torch.exp(-((self.distance / a) ** 2))

    def along_bonds(self, a: float, share: Tensor) -> Tensor:
        """Sum over neighbours of w v_j u u^T, with v_j of each edge, [E] -> [N, 3, 3]."""
        scale = self.window(a) * share
        return self.sum(scale[:, None, None] * outer(self.unit))

    def together(self, a: float) -> Tensor:
        """B b^T, [N, 3, 3]."""
        return outer(self.sum(self.window(a)[:, None] * self.unit))

    def apart(self, a: float) -> Tensor:
        """Sum over neighbours of w^2 u u^T, [N, 3, 3]."""
        return self.sum(self.window(a).square()[:, None, None] * outer(self.unit))

    def of_parts(self, a: float, forces: Tensor) -> Tensor:
        """Sum over neighbours of w (F . u)^2 u u^T, [N, 3] -> [N, 3, 3]."""
        along = (forces.index_select(0, self.receiver) * self.unit).sum(dim=1)
        scale = self.window(a) * along.square()
        return self.sum(scale[:, None, None] * outer(self.unit))

    def sum(self, per_edge: Tensor) -> Tensor:
        """Over the edges of each receiver, [E, ...] -> [N, ...]."""
        zeros = per_edge.new_zeros(self.num_atoms, *per_edge.shape[1:])
        return zeros.index_add(0, self.receiver, per_edge)


def outer(vectors: Tensor) -> Tensor:
    """X x^T of each row, [N, 3] -> [N, 3, 3]."""
    return vectors[:, :, None] * vectors[:, None, :]
