"""Batches of graphs with their targets, and what every data set can do."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from blips import keys
from blips.data.graph import Graph
from blips.errors import InputError


@dataclass(frozen=True)
class Batch:
    """S structures with N nodes in all, and what a model should say about them.

    Targets are energy [S] eV (always float64), forces [N, 3] eV/A, stress [S, 3, 3] eV/A^3; those
    that the data set has, or others by the names of the model's outputs.
    """

    graph: Graph
    targets: dict[str, Tensor]
    indices: tuple[int, ...]  # [S], numbers of the structures in their data set

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Copy on another device, with floating-point tensors but energies of another dtype."""
        targets = {
            name: target.to(device, None if name == keys.ENERGY else dtype)
            for name, target in self.targets.items()
        }
        return replace(self, graph=self.graph.to(device, dtype), targets=targets)

    @classmethod
    def join(cls, parts: Sequence["Batch"]) -> Self:
        """Join the structures of all parts into one batch, in order."""
        graphs = [part.graph for part in parts]
        targets = {
            name: torch.cat([part.targets[name] for part in parts]) for name in parts[0].targets
        }
        indices = tuple(index for part in parts for index in part.indices)
        return cls(type(graphs[0]).batch(graphs), targets, indices)


class TrainingData(Protocol):
    """What training and evaluation ask of a data set."""

    def __len__(self) -> int:
        """Return number of structures."""
        ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return a batch of the structures with these numbers, in this order."""
        ...

    def name_of(self, index: int) -> str:
        """Return where a structure comes from, for messages: file and frame."""
        ...


def check_indices(indices: Sequence[int], size: int) -> None:
    """Refuse indices that are empty or not within 0 to size - 1."""
    if len(indices) == 0:
        raise InputError("no structures were asked for; expected at least one index")
    if min(indices) < 0 or max(indices) >= size:
        raise InputError(f"indices {min(indices)} to {max(indices)} leave 0 to {size - 1}")
