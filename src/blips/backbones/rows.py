"""Rows that are neither edges nor atoms: undirected bonds, and pairs of edges at an atom.

Index work on the edges of a graph, done once for each graph and kept in its memo. Rows are
replica-major wherever the edges are.
"""

from itertools import pairwise

import torch
from ase.data import covalent_radii
from torch import Tensor

from blips.backbones.base import MAX_ATOMIC_NUMBER
from blips.data.graph import AtomGraph

NOBLE_GASES = (0, 2, 10, 18, 36, 54, 86, 118)
# A. Edges so little beyond a cutoff count as shorter (models give them no weight): those of a
# crystal that are exactly as long as the cutoff must not come and go with the last digit.
MARGIN = 1.37e-4


def undirected_bonds(graph: AtomGraph) -> tuple[Tensor, Tensor]:
    """Return the bond of every edge, [E], and the first edge of every bond, [B].

    An edge (i, j, shift) and its reverse (j, i, -shift) are one bond. Bonds are numbered by their
    first edges.
    """
    return graph.remember("undirected-bonds", lambda: _undirected_bonds(graph))


def edge_pairs(graph: AtomGraph, length: Tensor, cutoff: float) -> Tensor:
    """Return all ordered pairs of different edges of one receiver below `cutoff` (A), [2, P].

    Sorted by receiver, first edge and second edge. Atoms that moved, so that the edges have other
    lengths [E], have new pairs; edges that exceed the cutoff by less than `MARGIN` are in.
    """
    name = f"edge-pairs-{cutoff}"
    short = length.detach() < cutoff + MARGIN  # [E]
    of_these, pairs = graph.remember(name, lambda: (short, _edge_pairs(graph, short)))
    if not torch.equal(of_these, short):
        pairs = _edge_pairs(graph, short)
        graph.memo[name] = (short, pairs)
    return pairs


def element_features() -> Tensor:
    """Return number, period, place in it and radius (A) of every element, of order 1, [119, 4]."""
    rows = [[0.0] * 4]
    for period, (before, last) in enumerate(pairwise(NOBLE_GASES), start=1):
        for number in range(before + 1, last + 1):
            place = (number - before) / (last - before)
            rows.append([number / MAX_ATOMIC_NUMBER, period / 7, place, covalent_radii[number]])
    return torch.tensor(rows, dtype=torch.get_default_dtype())


def _undirected_bonds(graph: AtomGraph) -> tuple[Tensor, Tensor]:
    receiver, sender = graph.edge_index
    shift = graph.edge_shift.round().long()  # [E, 3]
    base = 2 * int(shift.abs().max()) + 1 if len(shift) else 1
    image = (shift * shift.new_tensor([base**2, base, 1])).sum(dim=1)  # one number for a shift
    reverse = (sender < receiver) | ((sender == receiver) & (image < 0))
    low, high = torch.minimum(receiver, sender), torch.maximum(receiver, sender)
    image = torch.where(reverse, -image, image)
    pair = (low * graph.num_nodes + high) * base**3 + image
    keys, bond = torch.unique(pair, return_inverse=True)  # sorted, [B], [E]
    edges = torch.arange(len(bond), device=bond.device)
    first = edges.new_full((len(keys),), len(bond)).scatter_reduce(0, bond, edges, "amin")
    first, order = first.sort()
    return order.argsort()[bond], first


def _edge_pairs(graph: AtomGraph, is_short: Tensor) -> Tensor:
    short = is_short.nonzero()[:, 0]  # [Q]
    receiver, order = graph.edge_index[0, short].sort(stable=True)
    short = short[order]
    of_atom = torch.bincount(receiver, minlength=graph.num_nodes)  # [N] short edges of an atom
    partners = of_atom[receiver]  # [Q] edges that each of them meets, itself among them
    start = (of_atom.cumsum(0) - of_atom)[receiver]  # [Q] the first of them
    places = torch.arange(len(short), device=short.device)
    first = places.repeat_interleave(partners)  # [P + Q]
    skipped = (partners.cumsum(0) - partners)[first]
    second = start[first] + torch.arange(len(first), device=short.device) - skipped
    different = first != second
    return short[torch.stack([first[different], second[different]])]
