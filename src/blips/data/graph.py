"""Batched graphs: atoms with their neighbours.

Letters: N atoms, E directed edges, S structures. Edge e goes from the sender j = edge_index[1, e]
to the receiver i = edge_index[0, e]; its vector is r_j + shift @ cell - r_i.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from blips.data.neighbours import NeighbourCache, find_neighbours
from blips.errors import InputError

MAX_ATOMIC_NUMBER = 118
NEAR = 10.0  # A, from the origin


@dataclass(frozen=True)
class Graph:
    """What every graph has: positions, edges, and the structure that each node belongs to.

    The memo has what models have worked out from the edges (triplets of atoms, say) and want to
    keep. Copies with other positions, strained cells among them, share it; batches and copies on
    another device start with none.
    """

    positions: Tensor  # [N, 3] A
    edge_index: Tensor  # [2, E] int64, (receiver, sender)
    structure: Tensor  # [N] int64, 0 <= structure < S
    num_structures: int
    memo: dict[str, Any] = field(default_factory=dict, kw_only=True, compare=False, repr=False)

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.positions.shape[0]

    @property
    def num_edges(self) -> int:
        """E."""
        return self.edge_index.shape[1]

    def vectors(self) -> Tensor:
        """Compute edge vectors r_j - r_i, [E, 3] A."""
        receiver, sender = self.edge_index
        return self.positions.index_select(0, sender) - self.positions.index_select(0, receiver)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Copy on another device, with floating-point tensors of another dtype."""
        moved = {
            name: v.to(device=device, dtype=dtype if v.is_floating_point() else None)
            for name, v in vars(self).items()
            if isinstance(v, Tensor)
        }
        same = all(v is getattr(self, name) for name, v in moved.items())
        return self if same else replace(self, memo={}, **moved)

    def turned(self, rotation: Tensor) -> Self:
        """Copy after a rotation, r -> rotation @ r; graphs with more vectors turn them too."""
        return replace(self, positions=self.positions @ rotation.T)

    def remember(self, name: str, work_out: Callable[[], Any]) -> Any:
        """Return what `work_out` gives, from the memo where it is there."""
        if name not in self.memo:
            self.memo[name] = work_out()
        return self.memo[name]

    def _contents(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "memo"}

    @classmethod
    def batch(cls, graphs: Sequence[Self]) -> Self:
        """Join graphs into one with the structures of all, in order."""
        if not graphs:
            raise InputError("no graphs to batch; expected at least one structure")
        columns = {name: [getattr(g, name) for g in graphs] for name in graphs[0]._contents()}
        sizes = {"structure": columns.pop("num_structures")}
        sizes["edge_index"] = [g.num_nodes for g in graphs]
        for name, counts in sizes.items():  # numbers go on where those of the graph before end
            offsets = np.cumsum([0, *counts]).tolist()
            columns[name] = [v + o for v, o in zip(columns[name], offsets, strict=False)]
        edges = torch.cat(columns.pop("edge_index"), dim=1)
        joined: dict[str, Any] = {name: torch.cat(v) for name, v in columns.items()}
        return cls(edge_index=edges, num_structures=sum(sizes["structure"]), **joined)

    def replicate(self, replicas: int) -> Self:
        """Return `replicas` copies as one batch; nodes, edges and structures are replica-major."""
        return self if replicas == 1 else type(self).batch([self] * replicas)

    def neighbourhood(self, nodes: int) -> Self:
        """Cut out about `nodes` nodes around the first, and the edges among them."""
        receiver, sender = self.edge_index
        chosen = torch.zeros(self.num_nodes, dtype=torch.bool, device=receiver.device)
        chosen[0] = True
        count = 0
        while count < (count := int(chosen.sum())) < nodes:
            chosen[receiver[chosen[sender]]] = True
        if count < nodes:
            chosen[:nodes] = True  # few have neighbours
        return self._of_nodes(chosen)

    def halves(self) -> tuple[Self, Self]:
        """Split into the first half of the structures, and the others."""
        first = self.structure < (self.num_structures + 1) // 2
        return self._of_nodes(first), self._of_nodes(~first)

    def _of_nodes(self, chosen: Tensor) -> Self:
        """Return the graph of chosen nodes [N] and of the edges among them; structures in order."""
        kept = chosen[self.edge_index].all(dim=0)  # [E]
        structures, structure = self.structure[chosen].unique(return_inverse=True)
        number = chosen.cumsum(0) - 1  # [N], of a chosen node among them
        changes: dict[str, Any] = {
            "num_structures": len(structures),
            "structure": structure,
            "edge_index": number[self.edge_index[:, kept]],
        }
        for name, value in self._contents().items():
            if name not in changes:
                rows = {"edge_shift": kept, "cell": structures, "pbc": structures}.get(name, chosen)
                changes[name] = value[rows]
        return replace(self, memo={}, **changes)

    def node_counts(self) -> Tensor:
        """Count the nodes of each structure, [S]."""
        return torch.bincount(self.structure, minlength=self.num_structures)

    def sum_over_structures(self, per_node: Tensor) -> Tensor:
        """Sum rows of atoms over structures, [N, ...] -> [S, ...]."""
        out = per_node.new_zeros(self.num_structures, *per_node.shape[1:])
        return out.index_add(0, self.structure, per_node)


@dataclass(frozen=True)
class AtomGraph(Graph):
    """Atoms and all pairs within a cutoff, periodic or not, one or many structures."""

    numbers: Tensor  # [N] int64, atomic numbers
    cell: Tensor  # [S, 3, 3] A, rows are lattice vectors, zero where there is none
    pbc: Tensor  # [S, 3] bool
    edge_shift: Tensor  # [E, 3] whole numbers of lattice vectors, in the float dtype

    def vectors(self) -> Tensor:
        """Compute edge vectors r_j + shift @ cell - r_i, [E, 3] A."""
        receiver = self.edge_index[0]
        cell = self.cell.index_select(0, self.structure.index_select(0, receiver))  # [E, 3, 3]
        shift = (self.edge_shift[:, :, None] * cell).sum(dim=1)  # [E, 3]
        return super().vectors() + shift

    def turned(self, rotation: Tensor) -> Self:
        """Copy after a rotation of positions and cell."""
        return replace(super().turned(rotation), cell=self.cell @ rotation.T)

    def volumes(self) -> Tensor:
        """Compute cell volumes, [S] A^3; error unless every structure has three lattice vectors."""
        volumes = torch.linalg.det(self.cell).abs()
        if not bool((volumes > 0).all()):
            index = int((volumes <= 0).nonzero()[0])
            raise InputError(
                f"structure {index} of the batch has no volume, but stress was asked for; "
                "give it three independent lattice vectors or ask for energy and forces only"
            )
        return volumes

    @classmethod
    def from_atoms(
        cls,
        atoms: Atoms,
        cutoff: float,
        dtype: torch.dtype | None = None,
        cache: NeighbourCache | None = None,
    ) -> Self:
        """Build the graph of all pairs within `cutoff` (A); a cache belongs to one structure."""
        dtype = dtype or torch.get_default_dtype()
        numbers = atoms.numbers.astype(np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() <= MAX_ATOMIC_NUMBER:
            raise InputError(
                f"atomic numbers from {numbers.min()} to {numbers.max()}; expected elements, 1 to "
                f"{MAX_ATOMIC_NUMBER}"
            )
        edges, shift = cache.find(atoms, cutoff) if cache else find_neighbours(atoms, cutoff)
        positions, moved = near_origin(atoms)
        if moved.any():
            shift = shift + moved[edges[1]] - moved[edges[0]]
        return cls(
            positions=torch.as_tensor(positions, dtype=dtype),
            edge_index=torch.as_tensor(edges),
            structure=torch.zeros(len(atoms), dtype=torch.int64),
            num_structures=1,
            numbers=torch.as_tensor(numbers),
            cell=torch.as_tensor(atoms.cell.array[None].copy(), dtype=dtype),
            pbc=torch.as_tensor(atoms.pbc[None].copy()),
            edge_shift=torch.as_tensor(shift, dtype=dtype),
        )


def near_origin(atoms: Atoms) -> tuple[np.ndarray, np.ndarray]:
    """Move atoms near the origin, where single precision resolves their distances.

    Along periodic directions, unless all atoms are in or beside the cell, every atom goes to its
    image next to the origin. Along others, all move by the same whole number of Angstroms unless
    their centre is near. Returns positions, [N, 3] A, and by how many lattice vectors each atom was
    moved, [N, 3] int.
    """
    lattice = np.where(atoms.pbc[:, None], atoms.cell.array, 0.0)
    moved = np.round(atoms.positions @ np.linalg.pinv(lattice)).astype(np.int64)
    if np.abs(moved).max() <= 1:
        moved[:] = 0
    positions = atoms.positions - moved @ lattice
    centre = np.round(positions.mean(axis=0))
    if not atoms.pbc.all() and np.abs(centre).max() > NEAR:
        positions -= centre
    return positions, moved
