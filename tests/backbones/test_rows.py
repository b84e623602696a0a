"""Bonds and pairs of edges, against loops over the edges."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

from blips import testing
from blips.backbones import rows
from blips.backbones.rows import element_features, undirected_bonds
from blips.data.graph import AtomGraph
from helpers import quartz

CUTOFF = 4.0
STRUCTURES = {
    "quartz": lambda: quartz(rattle=0.1),
    "one atom and its images": lambda: bulk("Cu"),
    "ammonia": lambda: molecule("NH3"),
    "a lone atom": lambda: Atoms("N"),
    "a skewed cell": lambda: testing.random_structure(0),
}


def edge_pairs(graph: AtomGraph, cutoff: float) -> torch.Tensor:
    return rows.edge_pairs(graph, graph.vectors().norm(dim=1), cutoff)


@pytest.fixture(params=STRUCTURES)
def graph(request: pytest.FixtureRequest) -> AtomGraph:
    return AtomGraph.from_atoms(STRUCTURES[request.param](), CUTOFF)


def test_a_bond_is_an_edge_and_its_reverse(graph: AtomGraph):
    bond_of_edge, first_edge = undirected_bonds(graph)
    edges = [
        (i, j, tuple(shift))
        for (i, j), shift in zip(
            graph.edge_index.T.tolist(), graph.edge_shift.int().tolist(), strict=True
        )
    ]
    numbered: dict[frozenset, int] = {}
    for i, j, shift in edges:
        back = (j, i, tuple(-s for s in shift))
        numbered.setdefault(frozenset({(i, j, shift), back}), len(numbered))
    expected = [numbered[frozenset({(i, j, s), (j, i, tuple(-x for x in s))})] for i, j, s in edges]
    assert bond_of_edge.tolist() == expected
    assert first_edge.tolist() == [expected.index(bond) for bond in range(len(numbered))]
    assert torch.bincount(bond_of_edge).tolist() == [2] * len(numbered)


@pytest.mark.parametrize("cutoff", [3.0, 1e-3])
def test_pairs_are_all_pairs_of_short_edges_of_an_atom(graph: AtomGraph, cutoff: float):
    length = graph.vectors().norm(dim=1)
    short = [e for e in range(graph.num_edges) if length[e] < cutoff]
    receiver = graph.edge_index[0]
    expected = [
        [first, second]
        for first in short
        for second in short
        if first != second and receiver[first] == receiver[second]
    ]
    assert edge_pairs(graph, cutoff).T.tolist() == expected


def test_edges_in_any_order_have_the_same_pairs(graph: AtomGraph):
    order = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(0))
    shuffled = AtomGraph(
        **{
            **graph._contents(),
            "edge_index": graph.edge_index[:, order],
            "edge_shift": graph.edge_shift[order],
        }
    )
    found = order[edge_pairs(shuffled, 3.0)].T.tolist()
    assert sorted(found) == edge_pairs(graph, 3.0).T.tolist()


def test_rows_of_replicas_come_one_replica_after_the_other(graph: AtomGraph):
    bond_of_edge, first_edge = undirected_bonds(graph)
    pairs = edge_pairs(graph, 3.0)
    replicas = graph.replicate(3)
    bonds_of_edges, first_edges = undirected_bonds(replicas)
    all_pairs = edge_pairs(replicas, 3.0)
    for k in range(3):
        bonds = bonds_of_edges.view(3, graph.num_edges)[k]
        assert torch.equal(bonds, bond_of_edge + k * len(first_edge))
        edges = k * graph.num_edges
        assert torch.equal(first_edges.view(3, len(first_edge))[k], first_edge + edges)
        assert torch.equal(all_pairs.view(2, 3, pairs.shape[1])[:, k], pairs + edges)


def test_index_work_is_done_once(graph: AtomGraph):
    assert edge_pairs(graph, 3.0) is edge_pairs(graph, 3.0)
    assert edge_pairs(graph, 3.0) is not edge_pairs(graph, 2.0)
    assert undirected_bonds(graph)[0] is undirected_bonds(graph)[0]


def test_atoms_that_moved_have_new_pairs():
    atoms = Atoms("NH2", [[0, 0, 0], [1, 0, 0], [0, 2.9, 0]])
    graph = AtomGraph.from_atoms(atoms, CUTOFF)
    assert edge_pairs(graph, 3.0).shape[1] == 2
    step = torch.tensor([[0.0, -0.2, 0.0], [0.0] * 3, [0.0] * 3])
    moved = replace(graph, positions=graph.positions + step)
    assert edge_pairs(moved, 3.0).shape[1] == 0
    assert edge_pairs(graph, 3.0).shape[1] == 2


def test_pairs_of_edges_as_long_as_the_cutoff_do_not_depend_on_rounding():
    graph = AtomGraph.from_atoms(Atoms("Po", cell=[3.0] * 3, pbc=True), CUTOFF)
    length = graph.vectors().norm(dim=1)
    counts = {
        rows.edge_pairs(graph, length + rounding, 3.0).shape[1]
        for rounding in (-1e-6, 0.0, 1e-6, -1e-6 * torch.arange(len(length)))
    }
    assert counts == {6 * 5}


def test_elements_are_told_apart_by_numbers_of_order_one():
    features = element_features()
    assert features.shape == (119, 4)
    assert float(features.abs().max()) < 3
    assert len(np.unique(features.numpy(), axis=0)) == 119
    carbon = features[6]
    assert carbon.tolist() == pytest.approx([6 / 118, 2 / 7, 4 / 8, 0.76])
