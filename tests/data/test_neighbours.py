"""Neighbours kept between steps are those of a fresh search, in the same order."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.neighborlist import neighbor_list
from hypothesis import given, settings
from hypothesis import strategies as st

from blips.data.graph import AtomGraph
from blips.data.neighbours import NeighbourCache, find_neighbours
from blips.errors import InputError


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def random_structure(seed: int, n_atoms: int, pbc) -> Atoms:
    rng = np.random.default_rng(seed)
    cell = np.eye(3) * rng.uniform(3.0, 7.0, 3) + rng.uniform(-0.5, 0.5, (3, 3))
    positions = rng.uniform(-1.0, 2.0, (n_atoms, 3)) @ cell  # also outside of the cell
    return Atoms(numbers=rng.integers(1, 9, n_atoms), positions=positions, cell=cell, pbc=pbc)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 8),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.floats(0.0, 2.0),
    st.lists(st.sampled_from(["move", "jump", "strain", "wrap", "pbc", "element"]), max_size=6),
)
def test_a_kept_list_equals_a_fresh_one(seed, n_atoms, pbc, skin, changes):
    rng = np.random.default_rng(seed)
    atoms, cache = random_structure(seed, n_atoms, pbc), NeighbourCache(skin)
    assert_same(cache.find(atoms, 4.0), find_neighbours(atoms, 4.0))
    for change in changes:
        if change in ("move", "jump"):
            atoms.positions += rng.normal(0.0, 0.1 if change == "move" else 2.0, (n_atoms, 3))
        elif change == "strain":
            strain = np.eye(3) + rng.uniform(-0.05, 0.05, (3, 3))
            atoms.set_cell(atoms.cell.array @ strain, scale_atoms=bool(rng.integers(2)))
        elif change == "wrap":
            atoms.wrap()
        elif change == "pbc":
            atoms.pbc = rng.integers(0, 2, 3).astype(bool)
        else:
            atoms.numbers[rng.integers(n_atoms)] = 26
        assert_same(cache.find(atoms, 4.0), find_neighbours(atoms, 4.0))


@pytest.mark.parametrize("pbc", [True, False, (True, False, True)])
def test_pairs_are_those_of_ase_and_sorted(pbc):
    atoms = random_structure(3, 7, pbc)
    edges, shifts = find_neighbours(atoms, 4.5)
    i, j, shift = neighbor_list("ijS", atoms, 4.5)
    rows = np.column_stack([*edges, shifts])
    expected = np.column_stack([i, j, shift])
    np.testing.assert_array_equal(rows, expected[np.lexsort(expected.T[::-1])])


def test_the_list_is_searched_again_only_when_it_must_be():
    atoms, cache = bulk("Cu", cubic=True) * 2, NeighbourCache(skin=0.4)
    cache.find(atoms, 4.0)
    atoms.positions[0] += [0.2, 0.0, 0.0]  # skin / 2: still allowed
    cache.find(atoms, 4.0)
    assert cache.searches == 1
    atoms.positions[0] += [1e-6, 0.0, 0.0]
    cache.find(atoms, 4.0)
    assert cache.searches == 2
    cache.find(atoms, 4.5)  # another model's cutoff
    assert cache.searches == 3


def test_two_atoms_that_close_in_from_beyond_the_skin_are_found():
    """Each moves by less than skin / 2, together by less than the skin."""
    atoms, cache = Atoms("H2", [[0.0, 0.0, 0.0], [4.39, 0.0, 0.0]]), NeighbourCache(skin=0.4)
    assert cache.find(atoms, 4.0)[0].shape == (2, 0)
    atoms.positions += [[0.198, 0.0, 0.0], [-0.198, 0.0, 0.0]]
    assert cache.find(atoms, 4.0)[0].tolist() == [[0, 1], [1, 0]]
    assert cache.searches == 1


def test_graphs_are_equal_bit_for_bit():
    atoms, cache = bulk("NaCl", "rocksalt", a=5.6, cubic=True) * (2, 1, 1), NeighbourCache()
    for step in range(5):
        atoms.rattle(0.05, seed=step)
        kept = AtomGraph.from_atoms(atoms, 5.0, torch.float32, cache)
        fresh = AtomGraph.from_atoms(atoms, 5.0, torch.float32)
        for name in ("positions", "edge_index", "edge_shift", "cell", "numbers"):
            assert torch.equal(getattr(kept, name), getattr(fresh, name)), name
    assert cache.searches < 5


def test_what_a_search_refuses_a_kept_list_refuses():
    atoms, cache = molecule("H2O"), NeighbourCache(skin=1.0)
    cache.find(atoms, 4.0)
    broken = atoms.copy()
    broken.positions[0, 0] = np.nan
    with pytest.raises(InputError, match="NaN"):
        cache.find(broken, 4.0)
    assert_same(cache.find(atoms, 4.0), find_neighbours(atoms, 4.0))
    near = Atoms("H2", [[0.0, 0.0, 0.0], [0.3, 0.0, 0.0]])
    cache.find(near, 4.0)
    near.positions[1] = 0.0
    with pytest.raises(InputError, match="same place"):
        cache.find(near, 4.0)
    with pytest.raises(InputError, match="skin"):
        NeighbourCache(skin=-0.1)
