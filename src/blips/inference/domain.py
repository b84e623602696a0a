"""What a posterior can know something about: elements, and how close two atoms come.

Error bars are first order in the noise of the weights. Where two atoms are much closer than any
that the model has seen, the energy itself is meaningless, and so is its error bar: such atoms, and
those of unknown elements, lie outside the domain.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from ase.data import covalent_radii
from torch import Tensor

from blips.backbones.base import MAX_ATOMIC_NUMBER
from blips.data.graph import AtomGraph

MARGIN = 0.8  # of the least distance seen: closer is outside
BONDED = 0.6  # of the sum of the covalent radii, for pairs of elements that were not seen together
SIZE = MAX_ATOMIC_NUMBER + 1


def _never() -> Tensor:
    return torch.full((SIZE, SIZE), torch.inf)


@dataclass(frozen=True, eq=False)
class Domain:
    """Elements and least distances of some structures.

    Attributes:
        numbers: atomic numbers that were seen.
        least: smallest distance of each pair of elements, symmetric, infinite where the pair was
            not seen within the cutoff, [119, 119] A.
    """

    numbers: frozenset[int] = frozenset(range(1, SIZE))
    least: Tensor = field(default_factory=_never, repr=False)

    @classmethod
    def of(cls, graph: AtomGraph) -> "Domain":
        """Find the domain of a batch of structures."""
        receiver, sender = graph.numbers[graph.edge_index]  # [E]
        distance = graph.vectors().norm(dim=1).float().cpu()
        least = _never().view(-1)
        least = least.scatter_reduce(0, (receiver * SIZE + sender).cpu(), distance, "amin")
        least = least.view(SIZE, SIZE)
        return cls(frozenset(graph.numbers.tolist()), torch.minimum(least, least.T))

    @classmethod
    def joined(cls, parts: Iterable["Domain"]) -> "Domain":
        """Join the domains of the structures of all parts."""
        numbers, least = frozenset[int](), _never()
        for part in parts:
            numbers, least = numbers | part.numbers, torch.minimum(least, part.least)
        return cls(numbers, least)

    @cached_property
    def _limits(self) -> Tensor:
        """Square of the distance below which a pair is outside, [119, 119] A^2."""
        radii = torch.tensor(covalent_radii[:SIZE], dtype=torch.float32)
        bonded = BONDED * (radii[:, None] + radii)
        return torch.where(self.least.isfinite(), MARGIN * self.least, bonded).square()

    @cached_property
    def known(self) -> Tensor:
        """Whether each atomic number was seen, [119] bool."""
        known = torch.zeros(SIZE, dtype=torch.bool)
        known[list(self.numbers)] = True
        return known

    def lacks(self, graph: AtomGraph) -> Tensor | None:
        """Return atoms of unknown elements, [N] bool; None where there are none."""
        lacking = ~self.known.to(graph.numbers.device)[graph.numbers]
        return lacking if bool(lacking.any()) else None

    def contains(self, graph: AtomGraph) -> Tensor:
        """Return whether each atom's element is known and no neighbour is too close, [N] bool."""
        inside = self.known.to(graph.numbers.device)[graph.numbers]  # [N]
        receiver, sender = graph.numbers[graph.edge_index]  # [E]
        limits = self._limits.to(graph.numbers.device)
        close = graph.vectors().square().sum(dim=1) < limits[receiver, sender]  # [E]
        if bool(close.any()):
            inside[graph.edge_index[:, close].flatten()] = False
        return inside

    def to_dict(self) -> dict[str, float]:
        """Return the least distances of the pairs that were seen, "Z-Z'" -> A, JSON-able."""
        pairs = self.least.isfinite().triu().nonzero().tolist()
        return {f"{a}-{b}": float(self.least[a, b]) for a, b in pairs}

    @classmethod
    def from_dict(cls, numbers: Iterable[int], distances: Mapping[str, float]) -> "Domain":
        """Restore what `to_dict` returned; without distances, covalent radii are used."""
        least = _never()
        for pair, distance in distances.items():
            a, b = map(int, pair.split("-"))
            least[a, b] = least[b, a] = float(distance)
        return cls(frozenset(numbers), least)


EVERY_ELEMENT = Domain()
"""Of a model that has seen nothing: distances by covalent radii."""
