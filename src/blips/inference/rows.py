"""Rows of structures: what a posterior is conditioned on, and what its scale is fitted on.

A structure has one row for its energy and 3N for its forces. Where 3N are too many, q random sums
u . F, u = +-1 / sqrt(q), stand in for them: the sum of their outer products has the same mean.

Structures are read in batches and leave only their sum of outer products, so memory is bounded by
the square of the dimension, whatever the number of structures. Several processes take every n-th
structure each and add their sums.
"""

from collections.abc import Iterable, Iterator, Sequence, Sized

import torch
import torch.distributed as dist
from ase import Atoms
from torch import Tensor

from blips import keys
from blips.backbones.base import atomistic
from blips.bayes.condition import Evidence
from blips.bayes.noise import seeded_generator
from blips.data.graph import AtomGraph
from blips.data.structures import batches_of
from blips.errors import InputError, TooLargeError
from blips.inference.domain import Domain
from blips.inference.linearise import Linearised, LinearModel
from blips.inference.memory import available_bytes
from blips.inference.posterior import ConditionedPosterior
from blips.progress import track

BATCH_ATOMS = 256  # of a batch whose rows are computed
MATRICES = 4  # of dimension x dimension float64, that are alive at once at worst


def collect(
    model: LinearModel,
    structures: Iterable[Atoms],
    *,
    rows: int,
    seed: int,
    before: ConditionedPosterior | None = None,
) -> tuple[Evidence, int, Domain]:
    """Sum the rows of energies and forces of all structures, count these, and find their domain.

    A structure has its force components for rows where these are at most `rows`, else so many
    random sums, functions of the seed and of its number. What a posterior has seen `before` is
    included.
    """
    first = 0 if before is None else before.structures
    backbone, size = atomistic(model.backbone), model.maps.sketch.size
    check_memory(size)
    parallel = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if parallel else (0, 1)
    evidence, count, domain = Evidence(size), 0, Domain.joined([])
    total = len(structures) if isinstance(structures, Sized) else None
    for batch in batches_of(track(structures, "conditioning", total), BATCH_ATOMS):
        own = [(count + k, atoms) for k, atoms in enumerate(batch) if (count + k) % world == rank]
        count += len(batch)
        for few in (True, False):  # all components, or random sums
            group = [(k, atoms) for k, atoms in own if (3 * len(atoms) <= rows) is few]
            if not group:
                continue
            graph = backbone.graph([atoms for _, atoms in group])
            domain = Domain.joined([domain, Domain.of(graph)])
            linearised = model(graph, depth="rows")
            evidence.add(linearised.energy_rows())
            generators = [seeded_generator("rows", seed, first + k) for k, _ in group]
            directions = components(graph, rows) if few else random_sums(graph, rows, generators)
            for _, _, row in force_rows(linearised, directions):
                evidence.add(row)
    if count == 0:
        raise InputError("no structures to condition on; give at least one geometry")
    if world > 1:
        evidence, domain = _added_over_processes(evidence, domain)
    if before is None or before.evidence is None:
        return evidence, count, domain
    both = Evidence(size)
    both.merge(before.evidence)
    both.merge(evidence)
    return both, first + count, Domain.joined([before.domain, domain])


def check_memory(dimension: int) -> None:
    """Refuse a dimension whose matrices do not fit the machine."""
    needed, there = MATRICES * 8.0 * dimension**2, available_bytes()
    if needed > there:
        largest = int((there / (MATRICES * 8.0)) ** 0.5)
        raise TooLargeError(
            f"a posterior of {dimension} dimensions needs about {needed / 1e9:.3g} GB, and "
            f"{there / 1e9:.3g} GB are free; use dimension={largest} or less"
        )


def random_sums(
    graph: AtomGraph, count: int, generators: Sequence[torch.Generator]
) -> Iterator[Tensor]:
    """Yield `count` random directions u [N, 3], +-1 / sqrt(count), seeded by structure."""
    for _ in range(count):
        bits = [
            torch.randint(0, 2, (n, 3), generator=generator)
            for n, generator in zip(graph.node_counts().tolist(), generators, strict=True)
        ]
        signs = torch.cat(bits).to(graph.positions.device) * 2 - 1
        yield signs / count**0.5


def components(
    graph: AtomGraph, count: int, generator: torch.Generator | None = None
) -> Iterator[Tensor]:
    """Yield directions u [N, 3] of different force components: the first, or random ones.

    Each structure has `count`; beyond its last component, u is zero there.
    """
    atoms = graph.node_counts()  # [S]
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
        yield u.view(-1, 3)


def force_rows(
    linearised: Linearised, directions: Iterable[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each direction u [N, 3], which structures have it [S], and their rows b [n, d]."""
    known = list(directions)
    for u, row in zip(known, linearised.rows_along(keys.FORCES, known), strict=True):
        present = linearised.graph.sum_over_structures(u.square().sum(dim=1)) > 0
        yield u, present, row[present]


def _added_over_processes(evidence: Evidence, domain: Domain) -> tuple[Evidence, Domain]:
    """Sum the evidence of all processes, and join their domains."""
    gram, count = evidence.gram().clone(), torch.tensor([evidence.count])
    dist.all_reduce(gram)
    dist.all_reduce(count)
    least, farthest = domain.least.clone(), domain.farthest.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(farthest, dist.ReduceOp.MAX)
    return Evidence(evidence.dimension, gram, int(count)), Domain(least, farthest)
