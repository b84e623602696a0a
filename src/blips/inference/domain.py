"""What a posterior can know something about: elements, and how close and how lonely atoms are.

Error bars are first order in the noise of the weights. Where two atoms are much closer than any
that the model has seen, the energy itself is meaningless, and so is its error bar: such atoms, and
those of unknown elements, lie outside the domain. So do atoms whose nearest neighbour is much
farther than that of any atom of the element: little is left of what the model was trained on.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import torch
from ase.data import covalent_radii
from torch import Tensor

from blips.backbones.base import MAX_ATOMIC_NUMBER
from blips.data.graph import AtomGraph
from blips.errors import InputError

MARGIN = 0.8  # of the least distance seen: closer is outside
BONDED = 0.6  # of the sum of the covalent radii, for pairs of elements that were not seen together
FARTHER = 1.25  # of the largest distance to a nearest neighbour seen: farther is outside
BOND = 2.6  # covalent radii of an atom to its nearest neighbour that are never too far
SIZE = MAX_ATOMIC_NUMBER + 1
RADII = torch.tensor(covalent_radii[:SIZE], dtype=torch.float32)  # A


def _never() -> Tensor:
    return torch.full((SIZE, SIZE), torch.inf)


@dataclass(frozen=True, eq=False)
class Domain:
    """Elements, least distances and loneliest atoms of some structures; by default of all.

    Distances of pairs that were not seen within the cutoff are infinite, as is `farthest` where an
    atom had no neighbour, or where it is not known; it is zero for elements that were not seen.
    """

    least: Tensor = field(default_factory=_never, repr=False)  # of pairs, symmetric, [119, 119] A
    # largest distance of an atom of each element to its nearest neighbour, [119] A
    farthest: Tensor = field(default_factory=lambda: _never()[0], repr=False)

    @classmethod
    def of(cls, graph: AtomGraph) -> "Domain":
        """Find the domain of a batch of structures."""
        receiver, sender = graph.numbers[graph.edge_index]  # [E]
        distance = graph.vectors().norm(dim=1).float().cpu()
        least = _never().view(-1)
        least = least.scatter_reduce(0, (receiver * SIZE + sender).cpu(), distance, "amin")
        least = least.view(SIZE, SIZE)
        numbers, nearest = graph.numbers.cpu(), _nearest(graph, distance)
        farthest = torch.zeros(SIZE).scatter_reduce(0, numbers, nearest, "amax")
        return cls(torch.minimum(least, least.T), farthest)

    @classmethod
    def joined(cls, parts: Iterable["Domain"]) -> "Domain":
        """Join the domains of the structures of all parts."""
        least, farthest = _never(), torch.zeros(SIZE)
        for part in parts:
            least = torch.minimum(least, part.least)
            farthest = torch.maximum(farthest, part.farthest)
        return cls(least, farthest)

    @cached_property
    def _limits(self) -> Tensor:
        """Square of the distance below which a pair is outside, [119, 119] A^2."""
        bonded = BONDED * (RADII[:, None] + RADII)
        return torch.where(self.least.isfinite(), MARGIN * self.least, bonded).square()

    @cached_property
    def _far(self) -> Tensor:
        """Distance of the nearest neighbour beyond which an atom is outside, [119] A."""
        return torch.maximum(FARTHER * self.farthest, BOND * RADII)

    @cached_property
    def known(self) -> Tensor:
        """Whether each atomic number was seen, [119] bool."""
        return self.farthest > 0

    @property
    def numbers(self) -> frozenset[int]:
        """Atomic numbers that were seen."""
        return frozenset(self.known.nonzero().flatten().tolist())

    def contains(self, graph: AtomGraph) -> Tensor:
        """Return whether each atom's element is known and its nearest atom is as near, [N] bool."""
        device = graph.numbers.device
        square = graph.vectors().detach().square().sum(dim=1)  # [E]
        inside = self.known.to(device)[graph.numbers]  # [N]
        inside &= _nearest(graph, square) <= self._far.to(device).square()[graph.numbers]
        receiver, sender = graph.numbers[graph.edge_index]  # [E]
        close = square < self._limits.to(device)[receiver, sender]  # [E]
        if bool(close.any()):
            inside[graph.edge_index[:, close].flatten()] = False
        return inside

    def to_dict(self) -> dict[str, float]:
        """Return least distances, "Z-Z'" -> A, and finite farthest ones, "Z" -> A, JSON-able."""
        pairs = self.least.isfinite().triu().nonzero().tolist()
        far = {str(z): far for z, far in enumerate(self.farthest.tolist()) if 0 < far < inf}
        return {f"{a}-{b}": float(self.least[a, b]) for a, b in pairs} | far

    @classmethod
    def from_dict(cls, numbers: Iterable[int], distances: Mapping[str, float]) -> "Domain":
        """Restore what `to_dict` returned; without distances, covalent radii are used."""
        if strange := [z for z in numbers if z not in range(SIZE)]:
            raise InputError(f"{strange[0]} is no atomic number; expected 1 to {SIZE - 1}")
        least, farthest = _never(), torch.zeros(SIZE)
        farthest[list(numbers)] = torch.inf
        for atoms, distance in distances.items():
            a, _, b = atoms.partition("-")
            if b:
                least[int(a), int(b)] = least[int(b), int(a)] = float(distance)
            else:
                farthest[int(a)] = float(distance)
        return cls(least, farthest)


def _nearest(graph: AtomGraph, distance: Tensor) -> Tensor:
    """Return the least of the edges' distances [E] for each atom, infinite without any, [N]."""
    nearest = torch.full((graph.num_nodes,), torch.inf, dtype=distance.dtype)
    receiver = graph.edge_index[0].to(distance.device)
    return nearest.to(distance.device).scatter_reduce(0, receiver, distance, "amin")
