"""Error bars and members turn, move and are numbered with the structure."""

from contextlib import nullcontext

import numpy as np
import pytest
from ase import Atoms

from blips.testing import rotation_matrix
from helpers import quartz
from inference.conditioning import EXACT, FAR, predict

# The packages behind CHGNet and ORB.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def moved(atoms: Atoms, how: str) -> tuple[Atoms, np.ndarray, np.ndarray]:
    """The structure, the rotation of row vectors, and the place of each new atom in the old."""
    other, turn, order = atoms.copy(), np.eye(3), np.arange(len(atoms))
    if how == "rotation":
        turn = rotation_matrix(1).T
        other.set_cell(atoms.cell.array @ turn)
        other.positions = atoms.positions @ turn
    elif how == "reflection":
        turn = np.diag([1.0, 1.0, -1.0])
        other.set_cell(atoms.cell.array @ turn)
        other.positions = atoms.positions @ turn
    elif how == "translation":
        other.positions += [0.3, -1.2, 5.0]
    else:
        order = np.random.default_rng(0).permutation(len(atoms))
        other = atoms[order]
    return other, turn, order


MOVES = pytest.mark.parametrize("how", ["rotation", "reflection", "translation", "permutation"])


@MOVES
@pytest.mark.parametrize("structure", [FAR[1], quartz(0.1)], ids=["molecule", "crystal"])
def test_deviations_move_with_the_structure(potential, structure: Atoms, how: str):
    other, turn, order = moved(structure, how)
    options = {"samples": 5}
    if how == "reflection" and structure.pbc.any():
        options["stress"] = True
    with pytest.warns(UserWarning, match="no Si") if structure.pbc.any() else nullcontext():
        here, there = (predict(potential, atoms, **options) for atoms in (structure, other))
    np.testing.assert_allclose(there.energy_std, here.energy_std, **EXACT)
    np.testing.assert_allclose(there.energies_std, here.energies_std[order], **EXACT)
    size, moved_size = (np.linalg.norm(one.forces_std, axis=1) for one in (here, there))
    np.testing.assert_allclose(moved_size, size[order], rtol=1e-10, atol=1e-10 * size.max())
    np.testing.assert_allclose(there.forces, here.forces[order] @ turn, rtol=0.0, atol=1e-10)


@MOVES
def test_members_move_with_the_structure(potential, how: str):
    structure = quartz(0.1)
    other, turn, order = moved(structure, how)
    for member in potential.draw(2):
        here, there = (
            member(potential.backbone.graph(atoms), stress=True) for atoms in (structure, other)
        )
        here, there = ({k: v.numpy() for k, v in one.items()} for one in (here, there))
        np.testing.assert_allclose(there["energy"], here["energy"], **EXACT)
        np.testing.assert_allclose(there["forces"], here["forces"][order] @ turn, **EXACT)
        np.testing.assert_allclose(there["stress"], turn.T @ here["stress"] @ turn, **EXACT)
