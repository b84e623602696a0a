"""In single precision, forces do not depend on where in space a structure lies."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule

import blips
from blips.backbones import build, load
from blips.backbones.base import graph_batches
from helpers import quartz
from inference.models import small

SMALL = ("chgnet", "sevennet", "mattersim")  # with random weights
RELEASED = ("chgnet-r2scan", "sevennet-0")  # steeper, and their weights come with the packages
FULL_SIZE = {"orb-v3-direct-20": ("orb-direct", 20), "orb-v3-conservative-inf": ("orb", 120)}
TOLERANCE = 1e-5  # eV/A
FAR = 1e6 * np.array([1.0, -0.7, 0.3]) + np.array([0.123, 4.567, 8.9])  # A
# The packages behind CHGNet, ORB and MatterSim.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.fixture(
    scope="module",
    params=["painn", "schnet", "orb", "orb-direct", *SMALL, *RELEASED, *FULL_SIZE],
)
def potential(request) -> blips.BayesianPotential:
    if request.param in RELEASED:
        return blips.bayesianize(load(request.param))
    if request.param in FULL_SIZE:
        torch.manual_seed(0)
        family, neighbours = FULL_SIZE[request.param]
        backbone = build(family, max_num_neighbors=neighbours)
        backbone.pretrained = True
        with torch.no_grad():
            for weight in backbone.parameters():
                weight.mul_(2.0 if weight.ndim > 1 else 1.0)  # forces of some eV/A
        return blips.bayesianize(backbone)
    if request.param != "mattersim":
        return small(request.param, torch.float32)
    pytest.importorskip("mattersim", reason="mattersim is not installed")
    torch.manual_seed(0)
    settings = {"num_blocks": 2, "units": 8, "max_l": 4, "max_n": 4}
    return blips.bayesianize(build("mattersim", architecture=settings))


def test_a_graph_is_predicted_with_the_precision_that_the_model_gave_it(potential):
    graph = potential.backbone.graph(ammonia())
    (given,) = graph_batches(potential.backbone, graph)
    assert torch.equal(given.positions, graph.positions)


def ammonia() -> Atoms:
    atoms = molecule("NH3")
    atoms.rattle(0.1, seed=0)
    return atoms


def crystal() -> Atoms:
    return quartz(rattle=0.1)


def translated() -> Atoms:
    atoms = crystal()
    atoms.translate(FAR)
    return atoms


def diffused() -> Atoms:
    """Every atom in another periodic image, as after long dynamics."""
    atoms = crystal()
    images = np.random.default_rng(0).integers(-500, 500, size=(len(atoms), 3))
    atoms.positions += images @ atoms.cell.array
    return atoms


def lone() -> Atoms:
    atoms = ammonia()
    atoms.translate(FAR)
    return atoms


def slab() -> Atoms:
    atoms = crystal()
    atoms.pbc = [True, True, False]
    return atoms


def far_slab() -> Atoms:
    atoms = slab()
    atoms.translate(FAR)
    return atoms


@pytest.mark.parametrize(
    ("here", "there"),
    [(ammonia, lone), (crystal, translated), (crystal, diffused), (slab, far_slab)],
    ids=["molecule", "crystal", "diffused", "slab"],
)
def test_forces_are_those_near_the_origin(potential, here, there):
    if here is slab and "Orb" in type(potential.backbone).__name__:
        pytest.skip("ORB knows three periodic directions or none")
    expected, found = (potential.predict(f(), method="map") for f in (here, there))
    assert np.abs(expected.forces).max() > 100 * TOLERANCE
    np.testing.assert_allclose(found.forces, expected.forces, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found.energy, expected.energy, rtol=0, atol=TOLERANCE * 10)
