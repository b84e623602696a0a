"""Rows of structures: what a posterior is conditioned on, and what its scale is fitted on.

A structure has one row for its energy and 3N for its forces. Where 3N are too many, q random sums
u . F, u = +-1 / sqrt(q), stand in for them: the sum of their outer products has the same mean.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blips import keys
from blips.data.graph import AtomGraph
from blips.inference.linearise import Linearised


class Directions(NamedTuple):
    """One direction in the space of forces for each structure of a batch."""

    u: Tensor  # [N, 3]
    present: Tensor  # [S] bool, structures that have such a direction


def random_sums(
    graph: AtomGraph, count: int, generators: Sequence[torch.Generator]
) -> Iterator[Directions]:
    """`count` random directions with components +-1 / sqrt(count); a generator each structure."""
    atoms = torch.bincount(graph.structure, minlength=graph.num_structures)  # [S]
    everywhere = torch.ones(graph.num_structures, dtype=torch.bool)
    for _ in range(count):
        bits = [
            torch.randint(0, 2, (n, 3), generator=generator)
            for n, generator in zip(atoms.tolist(), generators, strict=True)
        ]
        signs = torch.cat(bits) * 2 - 1
        yield Directions(signs / count**0.5, everywhere)


def components(
    graph: AtomGraph, count: int, generator: torch.Generator | None = None
) -> Iterator[Directions]:
    """`count` different force components of each structure: the first, or random ones."""
    atoms = torch.bincount(graph.structure, minlength=graph.num_structures)  # [S]
    first = (atoms.cumsum(0) - atoms) * 3
    order = [
        torch.arange(3 * n) if generator is None else torch.randperm(3 * n, generator=generator)
        for n in atoms.tolist()
    ]
    for k in range(min(count, 3 * int(atoms.max()))):
        present = 3 * atoms > k  # [S]
        places = [int(order[s][k]) if present[s] else 0 for s in range(len(order))]
        u = graph.positions.new_zeros(3 * graph.num_nodes)
        u[(first + torch.tensor(places))[present]] = 1.0
        yield Directions(u.view(-1, 3), present)


def force_rows(
    linearised: Linearised, directions: Iterable[Directions]
) -> Iterator[tuple[Directions, Tensor]]:
    """Each direction with its rows, [structures that have it, d]."""
    known: Sequence[Directions] = list(directions)
    rows = linearised.rows_along(keys.FORCES, (one.u for one in known))
    for one, row in zip(known, rows, strict=True):
        yield one, row[one.present]
