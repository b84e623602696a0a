"""Forces per atom and structure: by hand, under rotation, and on bad input."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blips.errors import InputError
from blips.uq.metrics import force_items


def test_atom_and_structure_forces_by_hand():
    forces = np.array([[3.0, 4.0, 0.0], [0.0, 0.0, 1.0], [0.0, 2.0, 0.0]])
    reference = np.array([[3.0, 4.0, 2.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    std = np.array([[1.0, 2.0, 2.0], [1.0, 1.0, 1.0], [2.0, 1.0, 2.0]])
    atoms = force_items(forces, std, reference)
    np.testing.assert_allclose(atoms.norm, [5, 1, 2])
    np.testing.assert_allclose(atoms.std**2, [9, 3, 9])
    np.testing.assert_allclose(atoms.error**2, [4, 0, 4])
    structures = force_items(forces, std, reference, [2, 1])
    np.testing.assert_allclose(structures.norm, [3.0, 2.0])
    np.testing.assert_allclose(structures.norm_ref, [(np.sqrt(29) + 1) / 2, 0])
    np.testing.assert_allclose(structures.std, [np.sqrt(6), 3])
    np.testing.assert_allclose(structures.error**2, [2, 4])


@settings(max_examples=20)
@given(st.integers(0, 2**31))
def test_structure_forces_ignore_rotation(seed):
    rng = np.random.default_rng(seed)
    forces, reference = rng.normal(size=(2, 5, 3))
    std = np.repeat(rng.uniform(0.1, 1.0, (5, 1)), 3, axis=1)
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    before = force_items(forces, std, reference, [2, 3])
    after = force_items(forces @ rotation, std, reference @ rotation, [2, 3])
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old)


def test_bad_input_is_refused():
    forces = np.ones((3, 3))
    for n_atoms in ([2, 2], [3, 0]):
        with pytest.raises(InputError, match="at least 1 that add up"):
            force_items(forces, forces, forces, n_atoms)
    with pytest.raises(InputError, match="one row per atom"):
        force_items(np.ones(3), np.ones(3), np.ones(3))
