"""Batches of graphs with their targets; data sets from memory, or from a file larger than it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

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


class AtomData:
    """Labelled structures, whose graphs and labels are made whenever they are asked for.

    `source` is the file, for messages. `cutoff` is that of the graphs, A, or the function
    (structure, dtype) -> graph of a model that has its own idea of neighbours. `dtype` is torch's
    default where None.
    """

    def __init__(
        self,
        structures: Sequence[Atoms] | XyzFrames,
        cutoff: float | GraphOf,
        *,
        source: str | Path = "structures",
        quantities: Sequence[str] = (keys.ENERGY, keys.FORCES),
        labels: Labels | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if len(structures) == 0:
            raise InputError(f"{source}: no structures; expected at least one")
        self.structures = structures
        self.source = source
        self.cutoff = cutoff
        self.quantities = tuple(quantities)
        self.labels = labels or Labels()
        self.dtype = dtype or torch.get_default_dtype()

    def __len__(self) -> int:
        return len(self.structures)

    def __iter__(self) -> Iterator[Atoms]:
        """Yield all structures."""
        return map(self.atoms, range(len(self)))

    def name_of(self, index: int) -> str:
        """Return file and frame."""
        return f"{self.source}, frame {index}"

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return a batch of the structures with these numbers, in this order."""
        check_indices(indices, len(self))
        return Batch.join([self._sample(index) for index in indices])

    def atoms(self, index: int) -> Atoms:
        """Return the structure with this number."""
        return self.structures[index]

    def _sample(self, index: int) -> Batch:
        """Return a batch of one structure."""
        atoms = self.atoms(index)
        return Batch(self._graph(atoms, index), self._targets(atoms, index), (index,))

    def _graph(self, atoms: Atoms, index: int) -> AtomGraph:
        with _named(self.name_of(index)):
            if callable(self.cutoff):
                return self.cutoff(atoms, self.dtype)
            return AtomGraph.from_atoms(atoms, self.cutoff, self.dtype)

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


class StructureData(AtomData):
    """Labelled structures in memory. Labels are read at once, each graph at its first use.

    The arguments are those of `AtomData`; `frames` are the structures' numbers in their source,
    where they are not all of it.
    """

    structures: tuple[Atoms, ...]

    def __init__(
        self,
        structures: Sequence[Atoms],
        cutoff: float | GraphOf,
        *,
        frames: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(tuple(structures), cutoff, **options)
        self.frames = range(len(structures)) if frames is None else frames
        self._all_targets = [self._targets(atoms, i) for i, atoms in enumerate(structures)]
        self._samples: dict[int, Batch] = {}

    def name_of(self, index: int) -> str:
        """Return file and frame."""
        return f"{self.source}, frame {self.frames[index]}"

    def _sample(self, index: int) -> Batch:
        if index not in self._samples:
            graph = self._graph(self.structures[index], index)
            self._samples[index] = Batch(graph, self._all_targets[index], (index,))
        return self._samples[index]


class StreamedData(AtomData):
    """Labelled structures of an extended xyz file that need not fit in memory.

    Batches are those of `StructureData`. Convert other formats first: `ase convert file.traj
    file.extxyz`.
    """

    def __init__(self, path: str | Path, cutoff: float | GraphOf, **options: Any) -> None:
        super().__init__(XyzFrames(path), cutoff, source=path, **options)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefix errors about a structure with its name."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
