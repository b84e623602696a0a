"""ANI-1x: the package's numbers, the contract, error bars of one member."""

import numpy as np
import pytest
import torch
from ase.build import molecule
from ase.units import Hartree

import blips
from blips import testing
from blips.data.structures import check_structures
from blips.errors import CheckpointError, ConfigError, InputError
from studies.released.ani_backbone import ANI

pytest.importorskip("importlib_metadata")
if not __import__("importlib").util.find_spec("torchani"):
    pytest.skip("torchani is not installed", allow_module_level=True)


def distorted(name, seed=0):
    atoms = molecule(name)
    atoms.rattle(0.1, seed=seed)
    return atoms


MOLECULES = [distorted("CH3CH2OH"), distorted("CH3CONH2"), distorted("H2O")]


@pytest.fixture(scope="module")
def potential():
    return blips.bayesianize(ANI.released(member=3)).double()


def test_energies_and_forces_are_the_packages(potential):
    """The package's own features, neighbour search and sum over elements on the same member."""
    own = ANI.released(member=3).model.double()
    prediction = potential.predict(MOLECULES, method="map")
    for number, atoms in enumerate(MOLECULES):
        positions = torch.tensor(atoms.positions)[None].requires_grad_()
        energy = own((torch.tensor(atoms.numbers)[None], positions)).energies * Hartree
        (gradient,) = torch.autograd.grad(energy.sum(), positions)
        assert prediction[number].energy[0] == pytest.approx(energy.item(), abs=1e-7)
        np.testing.assert_allclose(prediction[number].forces, -gradient[0].numpy(), atol=1e-7)


def test_the_contract():
    structures = [
        testing.random_structure(seed, periodic=periodic, elements=("C", "N", "O", "H"))
        for seed, periodic in ((0, True), (3, False))
    ]
    testing.check_contract(ANI.released(), structures)


def test_members_differ_and_error_bars_grow_away_from_what_was_seen(potential):
    known = [distorted("CH3CH2OH", seed) for seed in range(12)]
    other = ANI.released(member=4)
    labelled = check_structures(other_labels(other, known[8:]), "known")
    fresh = blips.bayesianize(ANI.released(member=3))
    fresh.condition(known[:8], valid=labelled)
    near, far = molecule("CH3CH2OH"), molecule("CH3CH2OH")
    far.rattle(0.4, seed=1)
    std = [np.linalg.norm(fresh.predict(a).forces_total_std, axis=1).max() for a in (near, far)]
    assert std[1] > 3 * std[0]
    means = fresh.predict(near).energy
    assert means == fresh.predict(near, method="map").energy


def other_labels(backbone, structures):
    """Structures labelled by another member."""
    prediction = blips.bayesianize(backbone).predict(structures, method="map")
    return prediction.to_atoms(structures)


def test_a_checkpoint_keeps_its_weights(potential, tmp_path):
    blips.save(potential, tmp_path / "ani.safetensors")
    again = blips.load(tmp_path / "ani.safetensors")
    expected = potential.predict(MOLECULES, method="map").array("energy")
    np.testing.assert_array_equal(again.predict(MOLECULES, method="map").array("energy"), expected)


def test_mistakes_name_the_remedy(potential, tmp_path):
    with pytest.raises(ConfigError, match="members 0 to 7"):
        ANI.released(member=8)
    with pytest.raises(CheckpointError, match="weights=folder"):
        ANI.released(weights=tmp_path)
    with pytest.raises(InputError, match="does not know S"):
        potential.predict(molecule("SH2"), method="map")
