"""Batches of graphs with their targets; data sets from memory, or from a file larger than it."""

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import torch
from ase import Atoms
from torch import Tensor

from blips import keys
from blips.data.graph import AtomGraph, Graph
from blips.data.labels import Labels, extract
from blips.data.structures import XyzFrames
from blips.errors import InputError

GraphOf = Callable[[Atoms, torch.dtype], AtomGraph]


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


@runtime_checkable
class TrainingData(Sized, Protocol):
    """What training and evaluation ask of a data set of so many structures."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return a batch of the structures with these numbers, in this order."""
        ...

    def name_of(self, index: int) -> str:
        """Return where a structure comes from, for messages: file and frame."""
        ...


class StructureData:
    """Labelled structures and their graphs, in memory or read from a file whenever they are needed.

    In memory, labels are read at once and each graph is kept from its first use on. An extended xyz
    file may be larger than memory, as `XyzFrames`: convert other formats first (`ase convert
    file.traj file.extxyz`). Batches are the same.

    `source` is the file, for messages, and `frames` are the structures' numbers in it, where they
    are not all of it. `cutoff` is that of the graphs, A, or the function (structure, dtype) ->
    graph of a model that has its own idea of neighbours. `dtype` is torch's default where None.
    """

    def __init__(
        self,
        structures: Sequence[Atoms] | XyzFrames,
        cutoff: float | GraphOf,
        *,
        source: str | Path = "structures",
        frames: Sequence[int] | None = None,
        quantities: Sequence[str] = (keys.ENERGY, keys.FORCES),
        labels: Labels | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if len(structures) == 0:
            raise InputError(f"{source}: no structures; expected at least one")
        self.structures = structures if isinstance(structures, XyzFrames) else tuple(structures)
        self.source = source
        self.frames = range(len(structures)) if frames is None else frames
        self.graph_of: GraphOf = (
            cutoff if callable(cutoff) else lambda a, dtype: AtomGraph.from_atoms(a, cutoff, dtype)
        )
        self.quantities = tuple(quantities)
        self.labels = labels or Labels()
        self.dtype = dtype or torch.get_default_dtype()
        self._samples: dict[int, Batch] = {}
        self._labels_read: list[dict[str, Tensor]] = []
        if not isinstance(structures, XyzFrames):
            self._labels_read = [self._targets(atoms, i) for i, atoms in enumerate(structures)]

    def __len__(self) -> int:
        return len(self.structures)

    def __iter__(self) -> Iterator[Atoms]:
        """Yield all structures."""
        return (self.structures[index] for index in range(len(self)))

    def name_of(self, index: int) -> str:
        """Return file and frame."""
        return f"{self.source}, frame {self.frames[index]}"

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return a batch of the structures with these numbers, in this order."""
        return Batch.join([self._sample(index) for index in indices])

    def _sample(self, index: int) -> Batch:
        """Return a batch of one structure."""
        if index in self._samples:
            return self._samples[index]
        atoms = self.structures[index]
        targets = self._labels_read[index] if self._labels_read else self._targets(atoms, index)
        with _named(self.name_of(index)):
            sample = Batch(self.graph_of(atoms, self.dtype), targets, (index,))
        if self._labels_read:
            self._samples[index] = sample
        return sample

    def _targets(self, atoms: Atoms, index: int) -> dict[str, Tensor]:
        """Return energy [1], forces [n, 3] and stress [1, 3, 3] of one structure."""
        with _named(self.name_of(index)):
            found = extract(atoms, self.quantities, self.labels)
        return {
            name: torch.as_tensor(
                value if name == keys.FORCES else value[None],
                dtype=torch.float64 if name == keys.ENERGY else self.dtype,
            )
            for name, value in found.items()
        }


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefix errors about a structure with its name."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
