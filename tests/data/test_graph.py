"""Neighbour lists against brute force, and what batches of graphs promise."""

import itertools

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from hypothesis import given
from hypothesis import strategies as st

from blips.data.graph import AtomGraph, Graph, near_origin
from blips.errors import InputError
from blips.testing import random_structure

CUTOFF = 4.0


def brute_force(atoms: Atoms, cutoff: float) -> set[tuple[int, ...]]:
    """All (receiver, sender, shift) with 0 < |r_j + shift @ cell - r_i| < cutoff."""
    cell = atoms.cell.complete().array
    fractional = atoms.positions @ np.linalg.inv(cell)
    heights = 1.0 / np.linalg.norm(np.linalg.inv(cell), axis=0)
    spread = np.ptp(fractional, axis=0)
    reach = np.where(atoms.pbc, np.ceil(cutoff / heights + spread), 0).astype(int)
    found = set()
    for shift in itertools.product(*[range(-n, n + 1) for n in reach]):
        offset = np.array(shift) @ cell
        for i, j in np.ndindex(len(atoms), len(atoms)):
            distance = np.linalg.norm(atoms.positions[j] + offset - atoms.positions[i])
            if 0 < distance < cutoff:
                found.add((i, j, *shift))
    return found


def batch_of(structures: list[Atoms], cutoff: float = CUTOFF) -> AtomGraph:
    return AtomGraph.batch([AtomGraph.from_atoms(atoms, cutoff) for atoms in structures])


def neighbours(graph: AtomGraph) -> list[tuple[int, ...]]:
    rows = torch.cat([graph.edge_index.T, graph.edge_shift.long()], dim=1)
    return [tuple(row) for row in rows.tolist()]


@st.composite
def structures(draw: st.DrawFn) -> Atoms:
    """One to four atoms, in or outside a skewed cell of 2 to 5 A, periodic along any directions."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pbc = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    cell = np.diag(rng.uniform(2.0, 5.0, 3)) + rng.uniform(-0.7, 0.7, (3, 3))
    if draw(st.booleans()):
        cell[~np.array(pbc)] = 0.0  # as ASE leaves them for slabs, wires and molecules
    number = draw(st.integers(1, 4))
    return Atoms(["H"] * number, rng.uniform(-4.0, 6.0, (number, 3)), cell=cell, pbc=pbc)


@given(atoms=structures(), cutoff=st.floats(1.0, 6.0))
def test_neighbours_are_those_of_brute_force(atoms: Atoms, cutoff: float):
    graph = AtomGraph.from_atoms(atoms, cutoff, torch.float64)
    found = neighbours(graph)
    assert len(found) == len(set(found))
    atoms.positions = graph.positions.numpy()  # in the cell
    assert set(found) == brute_force(atoms, cutoff)


@given(atoms=structures(), far=st.sampled_from([0.0, 1e6]))
def test_atoms_move_by_lattice_vectors_and_all_together(atoms: Atoms, far: float):
    atoms.positions += far
    positions, moved = near_origin(atoms)
    assert not moved[:, ~atoms.pbc].any()
    rest = atoms.positions - moved @ atoms.cell.array - positions
    np.testing.assert_allclose(rest, np.round(rest[:1]).repeat(len(atoms), 0), atol=1e-8)
    assert np.abs(positions).max() < 30.0
    if atoms.pbc.all():
        np.testing.assert_allclose(rest, 0.0, atol=1e-8)


@given(atoms=structures())
def test_edges_come_in_pairs_of_opposite_vectors(atoms: Atoms):
    graph = AtomGraph.from_atoms(atoms, CUTOFF, torch.float64)
    lengths = graph.vectors().norm(dim=1)
    assert bool((lengths < CUTOFF).all())
    assert bool((graph.edge_index[0].diff() >= 0).all())  # receivers ascend
    edges = dict(zip(neighbours(graph), graph.vectors(), strict=True))
    for (i, j, *shift), vector in edges.items():
        opposite = edges[(j, i, *[-n for n in shift])]
        torch.testing.assert_close(opposite, -vector)


@pytest.mark.parametrize(("cutoff", "coordination"), [(2.6, 4), (4.0, 4 + 12)])
def test_shells_of_silicon(cutoff: float, coordination: int):
    graph = AtomGraph.from_atoms(bulk("Si", a=5.43), cutoff)  # two atoms, cell below the cutoff
    assert graph.edge_index[0].bincount().tolist() == [coordination, coordination]


def test_lone_atom_has_no_neighbours():
    graph = AtomGraph.from_atoms(Atoms("He"), CUTOFF)
    assert graph.num_nodes == 1
    assert graph.edge_index.shape == (2, 0)
    assert graph.vectors().shape == (0, 3)


@pytest.mark.parametrize("handedness", [1.0, -1.0])
def test_volumes_are_positive(handedness: float):
    cell = np.diag([2.0, 3.0, 4.0 * handedness])
    graph = AtomGraph.from_atoms(Atoms("H", cell=cell, pbc=True), CUTOFF)
    torch.testing.assert_close(graph.volumes(), torch.tensor([24.0]))


def test_graph_is_a_copy_of_the_atoms():
    atoms = molecule("H2O")
    graph = AtomGraph.from_atoms(atoms, CUTOFF, torch.float64)
    before = graph.positions.clone()
    atoms.positions += 1.0
    torch.testing.assert_close(graph.positions, before)


@given(kinds=st.lists(st.booleans(), min_size=1, max_size=4))
def test_batch_holds_every_structure_as_it_is_alone(kinds: list[bool]):
    atoms = [random_structure(seed, periodic) for seed, periodic in enumerate(kinds)]
    batch = batch_of([*atoms, Atoms("He")])
    assert batch.num_structures == len(kinds) + 1
    receivers = batch.structure[batch.edge_index[0]]
    assert torch.equal(receivers, batch.structure[batch.edge_index[1]])
    for index, one in enumerate(atoms):
        alone = AtomGraph.from_atoms(one, CUTOFF)
        mine = batch.structure == index
        assert torch.equal(batch.numbers[mine], alone.numbers)
        assert torch.equal(batch.positions[mine], alone.positions)
        assert torch.equal(batch.vectors()[receivers == index], alone.vectors())
        assert torch.equal(batch.cell[index], alone.cell[0])
        assert torch.equal(batch.pbc[index], alone.pbc[0])


def test_batches_of_batches_keep_their_order():
    graphs = [AtomGraph.from_atoms(random_structure(seed), CUTOFF) for seed in range(3)]
    nested = AtomGraph.batch([AtomGraph.batch(graphs[:2]), graphs[2]])
    flat = AtomGraph.batch(graphs)
    for name in ("positions", "edge_index", "structure", "numbers", "edge_shift", "cell"):
        assert torch.equal(getattr(nested, name), getattr(flat, name))
    assert nested.num_structures == flat.num_structures == 3


def test_replicas_are_copies_one_after_the_other():
    graph = batch_of([random_structure(0), random_structure(1, False)])
    copies = graph.replicate(3)
    assert (copies.num_nodes, copies.num_edges) == (3 * graph.num_nodes, 3 * graph.num_edges)
    assert copies.num_structures == 6
    torch.testing.assert_close(copies.vectors(), graph.vectors().repeat(3, 1))
    assert torch.equal(copies.numbers.view(3, -1), graph.numbers.expand(3, -1))
    assert copies.edge_index.view(2, 3, -1).amin(dim=(0, 2)).tolist() == [
        k * graph.num_nodes for k in range(3)
    ]
    assert graph.replicate(1) is graph


def test_halves_are_the_structures_as_they_were():
    structures = [molecule("NH3"), bulk("Cu", cubic=True), Atoms("H"), molecule("H2O"), bulk("Si")]
    whole = batch_of(structures, 4.0)
    for half, part in zip(whole.halves(), (structures[:3], structures[3:]), strict=True):
        expected = batch_of(part, 4.0)
        assert half.num_structures == expected.num_structures
        for name, value in expected._contents().items():
            assert torch.equal(torch.as_tensor(getattr(half, name)), torch.as_tensor(value)), name


def test_a_neighbourhood_has_the_edges_among_its_atoms():
    atoms = bulk("Cu", cubic=True) * (4, 4, 4)
    graph = batch_of([atoms, molecule("NH3")], 3.0)
    part = graph.neighbourhood(30)
    assert 30 <= part.num_nodes < 100
    assert part.num_structures == 1
    assert part.num_edges > 4 * part.num_nodes  # of 12: not torn out of many places
    assert int(part.edge_index.max()) < part.num_nodes
    assert part.vectors().norm(dim=1).max() < 3.0
    gas = AtomGraph.from_atoms(Atoms("H50", positions=9.0 * np.arange(150).reshape(50, 3)), 3.0)
    assert gas.neighbourhood(20).num_nodes == 20


def test_conversion_changes_only_floating_point_tensors():
    graph = AtomGraph.from_atoms(random_structure(0), CUTOFF, torch.float64).to(
        "cpu", torch.float32
    )
    floats = {graph.positions.dtype, graph.cell.dtype, graph.edge_shift.dtype}
    assert floats == {torch.float32}
    assert graph.edge_index.dtype == graph.numbers.dtype == graph.structure.dtype == torch.int64
    assert graph.pbc.dtype == torch.bool
    assert graph.num_structures == 1


def test_sum_over_structures():
    graph = batch_of([molecule("H2O"), Atoms("He"), molecule("N2")])
    sums = graph.sum_over_structures(torch.arange(6.0)[:, None])
    assert sums.tolist() == [[3.0], [3.0], [9.0]]


@pytest.mark.parametrize(
    ("atoms", "cutoff", "message"),
    [
        (Atoms(), CUTOFF, "without atoms"),
        (Atoms("H", [[np.nan, 0, 0]]), CUTOFF, "positions hold NaN"),
        (Atoms("H", cell=[np.inf, 1, 1], pbc=True), CUTOFF, "cell vectors hold NaN"),
        (Atoms("H", pbc=True), CUTOFF, "not independent"),
        (Atoms("H", cell=[[1, 0, 0], [2, 0, 0], [0, 0, 1]], pbc=True), CUTOFF, "not independent"),
        (Atoms("H2", [[0, 0, 0], [0, 0, 0]]), CUTOFF, "0 and 1 are at the same place"),
        (Atoms("H2", [[0, 0, 0], [3, 0, 0]], cell=[3, 3, 3], pbc=True), CUTOFF, "same place"),
        (molecule("H2O"), 0.0, "cutoff must be a positive"),
        (molecule("H2O"), float("nan"), "cutoff must be a positive"),
    ],
)
def test_unusable_structures_are_refused(atoms: Atoms, cutoff: float, message: str):
    with pytest.raises(InputError, match=message):
        AtomGraph.from_atoms(atoms, cutoff)


def test_empty_batch_and_missing_volume_are_refused():
    with pytest.raises(InputError, match="no graphs"):
        AtomGraph.batch([])
    graph = batch_of([random_structure(0), molecule("H2O")])
    with pytest.raises(InputError, match="structure 1 of the batch has no volume"):
        graph.volumes()


def test_plain_graphs_have_vectors_from_receiver_to_sender():
    graph = Graph(
        positions=torch.tensor([[0.0, 0, 0], [1.0, 2, 3]]),
        edge_index=torch.tensor([[0], [1]]),
        structure=torch.zeros(2, dtype=torch.int64),
        num_structures=1,
    )
    assert graph.vectors().tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize("number", [-1, 119, 10**6])
def test_numbers_that_are_no_elements_are_refused(number: int):
    with pytest.raises(InputError, match=f"{number}.*; expected elements, 1 to 118"):
        AtomGraph.from_atoms(Atoms(numbers=[1, number], positions=[[0, 0, 0], [0, 0, 1]]), 3.0)
