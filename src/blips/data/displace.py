"""Structures near the data that nobody labelled."""

from dataclasses import replace
from typing import TypeVar

import torch

from blips.data.graph import Graph

AnyGraph = TypeVar("AnyGraph", bound=Graph)


def displaced(graph: AnyGraph, largest_std: float, generator: torch.Generator) -> AnyGraph:
    """The structures with every coordinate moved by N(0, s^2), neighbours as they were.

    Args:
        graph: a batch of structures.
        largest_std: s of each structure is uniform between zero and this, A.
        generator: on the graph's device.
    """
    positions = graph.positions.detach()
    options = {"generator": generator, "device": positions.device, "dtype": positions.dtype}
    std = largest_std * torch.rand(graph.num_structures, **options)  # [S]
    move = torch.randn(positions.shape, **options) * std[graph.structure][:, None]  # [N, 3]
    return replace(graph, positions=positions + move)
