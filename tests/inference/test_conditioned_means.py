"""Means of a conditioned potential are bitwise those of the plain model."""

import copy

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk

import blips
from blips.backbones import PaiNN
from helpers import quartz
from inference.conditioning import (
    TRAIN,
    VALID,
    predict,
)
from inference.models import (
    boxed_ammonia,
    labelled,
    periodic,
    small,
)

# The packages behind CHGNet and ORB.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


BITWISE = ["painn", "schnet", "chgnet", "sevennet", "orb", "orb-direct"]


@pytest.mark.parametrize("maps", ["readout", "all"])
@pytest.mark.parametrize("name", BITWISE)
def test_means_are_bitwise_those_of_map(name: str, maps: str):
    if (name, maps) == ("chgnet", "all"):
        maps = "model.*twoBody*"  # others of its maps are changed in place
    potential = small(name, torch.float32)
    weights = copy.deepcopy(potential.state_dict())
    structures = [quartz(0.1, seed=3), boxed_ammonia(1)]
    for _ in range(3):  # ORB compiles itself in its first runs, and differs before
        before = potential.predict(structures, method="map")
    potential.condition(periodic(), valid=labelled(periodic()), maps=maps, dimension=64, rows=4)
    after = potential.predict(structures, method="map")
    found = predict(potential, structures, samples=2)
    for quantity in ("energy", "energies", "forces"):
        if before.energies is not None or quantity != "energies":
            np.testing.assert_array_equal(getattr(after, quantity), getattr(before, quantity))
            np.testing.assert_array_equal(getattr(found, quantity), getattr(before, quantity))
    assert all(torch.equal(v, weights[k]) for k, v in potential.state_dict().items())


@pytest.mark.parametrize("maps", ["readout", "all"])
def test_means_of_a_wide_painn_are_bitwise_those_of_map(maps: str):
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(cutoff=4.0, features=64, blocks=2))
    potential.condition(TRAIN, valid=VALID, maps=maps, dimension=64, rows=4)
    structures = [quartz(0.1), *TRAIN]
    plain = potential.predict(structures, method="map")
    with pytest.warns(UserWarning, match="no Si"):
        found = predict(potential, structures, samples=2)
    for quantity in ("energy", "energies", "forces"):
        np.testing.assert_array_equal(getattr(found, quantity), getattr(plain, quantity))


@pytest.mark.parametrize("name", BITWISE)
def test_the_stress_is_bitwise_that_of_map(name: str):
    potential = small(name, torch.float32)
    potential.condition(periodic(), valid=labelled(periodic()), rows=4)
    structures = [quartz(0.1, seed=seed) for seed in range(3, 7)]
    plain = potential.predict(structures, method="map", stress=True)
    found = predict(potential, structures, samples=2, stress=True)
    np.testing.assert_array_equal(found.stress, plain.stress)


def silicon(seed: int) -> Atoms:
    atoms = bulk("Si")
    atoms.rattle(0.1, seed=seed)
    return atoms


@pytest.mark.parametrize("name", ["chgnet", "sevennet-0"])
def test_means_of_released_models_are_bitwise_those_of_map(name: str):
    small(name.removesuffix("-0"))  # skips where the package is not there
    potential = blips.bayesianize(blips.backbones.load(name))
    potential.condition([silicon(0)], valid=labelled([silicon(1)]), dimension=32, rows=2)
    structure = silicon(2)
    plain = potential.predict(structure, method="map")
    found = predict(potential, structure, samples=2)
    for quantity in ("energy", "energies", "forces"):
        np.testing.assert_array_equal(getattr(found, quantity), getattr(plain, quantity))
    assert (found.forces_std > 0).all()
