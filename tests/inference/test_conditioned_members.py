"""Members of a conditioned posterior: smooth, conservative, linear in their noise."""

import itertools

import numpy as np
import pytest
import torch
from ase import Atoms
from torch import Tensor

import blips
from blips import keys
from blips.inference.sampling import Member
from inference.conditioning import (
    EXACT,
    FACTOR,
    FAR,
    VALID,
    conditioned,
    gram_of,
    predict,
    rescaled,
)
from inference.models import (
    boxed_ammonia,
    central,
    normal,
    periodic,
    small,
    with_frozen_noise,
    with_wide_coefficients,
)

# The packages behind CHGNet and ORB.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def energy_of(member, potential, atoms: Atoms) -> float:
    return float(member(potential.backbone.graph(atoms), forces=False)[keys.ENERGY])


def test_forces_of_members_are_slopes_of_their_energies(potential):
    for member in potential.draw(2):
        found = member(potential.backbone.graph(FAR[0]))[keys.FORCES]
        expected = np.zeros((len(FAR[0]), 3))
        for i, c in np.ndindex(*expected.shape):
            ends = []
            for step in (1e-4, -1e-4):
                atoms = FAR[0].copy()
                atoms.positions[i, c] += step
                ends.append(energy_of(member, potential, atoms))
            expected[i, c] = -(ends[0] - ends[1]) / 2e-4
        plain = potential(potential.backbone.graph(FAR[0]))[keys.FORCES]
        assert (found - plain).abs().max() > 1e-5
        np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-6 * np.abs(expected).max())


def test_the_stress_of_members_is_the_slope_of_their_energies(potential):
    structure = boxed_ammonia()
    for member in potential.draw(2):
        found = member(potential.backbone.graph(structure), stress=True)[keys.STRESS][0]
        expected = np.zeros((3, 3))
        for a, b in itertools.product(range(3), repeat=2):
            ends = []
            for step in (1e-4, -1e-4):
                strain = np.zeros((3, 3))
                strain[a, b] += step / 2
                strain[b, a] += step / 2
                atoms = structure.copy()
                atoms.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
                ends.append(energy_of(member, potential, atoms))
            expected[a, b] = (ends[0] - ends[1]) / 2e-4 / structure.get_volume()
        np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-6 * np.abs(expected).max())


def with_coefficients(maps: str) -> blips.BayesianPotential:
    potential = with_wide_coefficients(small("painn"))
    potential.condition(FAR[:1], valid=VALID, coefficients="network", maps=maps, dimension=64)
    rescaled(potential)
    coefficients = potential.coefficients(potential.backbone.graph(FAR[0]))
    values = [coefficients[name] for name in potential.posterior.maps.roles]
    assert min(float(value.std() / value.mean()) for value in values) > 0.01
    return potential


def slopes_by_weights(potential, v: Tensor) -> dict[str, Tensor]:
    """Of theta + sqrt(coef) |theta| (P v) with the inference network's coefficients."""
    graph, maps = potential.backbone.graph(FAR[0]), potential.posterior.maps
    ends = [with_frozen_noise(potential, maps, graph, v, t, network=True) for t in (1e-5, -1e-5)]
    return central(*ends, 1e-5)


MAPS = pytest.mark.parametrize("maps", ["readout", "all"])


@MAPS
def test_forces_of_members_with_coefficients_are_slopes_of_their_energies(maps: str):
    test_forces_of_members_are_slopes_of_their_energies(with_coefficients(maps))


@MAPS
@pytest.mark.parametrize("quantity", [keys.ENERGY, keys.FORCES])
def test_members_with_coefficients_are_slopes_by_weights(maps: str, quantity: str):
    potential = with_coefficients(maps)
    (member,) = potential.draw(1)
    graph = potential.backbone.graph(FAR[0])
    found = (member(graph)[quantity] - potential(graph)[quantity]).numpy()
    expected = slopes_by_weights(potential, member.noise)[quantity].numpy()
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-6 * np.abs(expected).max())


@MAPS
def test_rows_with_coefficients_are_slopes_by_weights(maps: str):
    """v^T G v is the sum of the squares of all slopes along v."""
    potential = with_coefficients(maps)
    v = normal(potential.posterior.maps.sketch.size)
    slopes = slopes_by_weights(potential, v)
    expected = slopes[keys.ENERGY].square().sum() + slopes[keys.FORCES].square().sum()
    assert float(v @ gram_of(potential) @ v) == pytest.approx(float(expected), rel=1e-6)


def test_members_are_linear_in_their_noise(painn):
    graph = painn.backbone.graph(periodic())
    v = normal(2, painn.posterior.maps.sketch.size)
    plain = painn(graph, stress=True)
    members = [
        Member(painn, noise)(graph, stress=True) for noise in (v[0], v[1], 300.0 * v[0] - v[1])
    ]
    for name, value in plain.items():
        one, other, both = (member[name] - value for member in members)
        torch.testing.assert_close(both, 300.0 * one - other, rtol=1e-9, atol=1e-9)


def test_members_without_noise_are_the_plain_model(painn):
    graph = painn.backbone.graph(FAR)
    nothing = torch.zeros(painn.posterior.maps.sketch.size).double()
    found = Member(painn, nothing)(graph)
    for name, value in painn(graph).items():
        assert torch.equal(found[name], value)


def test_a_member_is_a_function_of_seed_and_number(painn):
    graph = painn.backbone.graph(FAR)
    energies = [member(graph)[keys.ENERGY] for member in painn.draw(3)]
    assert torch.equal(painn.member(1)(graph)[keys.ENERGY], energies[1])
    assert torch.equal(painn.draw(2)[1](graph)[keys.ENERGY], energies[1])
    again = conditioned()
    torch.testing.assert_close(again.member(2)(graph)[keys.ENERGY], energies[2], **EXACT)
    others = [painn.member(1, seed=1)(graph)[keys.ENERGY], energies[0], energies[2]]
    assert all((other - energies[1]).abs().min() > 1e-6 for other in others)


def test_members_predict(painn):
    (member,) = painn.draw(1)
    prediction = member.predict(FAR)
    outputs = member(painn.backbone.graph(FAR))
    np.testing.assert_array_equal(prediction.energy, outputs[keys.ENERGY])
    np.testing.assert_array_equal(prediction.forces, outputs[keys.FORCES])
    assert prediction.forces_std is None


def test_deviations_are_those_of_the_members(painn):
    """From the plain model, with K in the denominator; energies by the exact form."""
    graph = painn.backbone.graph(FAR)
    members = [member(graph) for member in painn.draw(4, seed=5)]
    prediction = predict(painn, FAR, samples=4, seed=5)
    off = torch.stack([one[keys.FORCES] for one in members]) - painn(graph)[keys.FORCES]
    np.testing.assert_allclose(prediction.forces_std, off.square().mean(0).sqrt(), rtol=1e-8)
    of_atoms = torch.stack([one[keys.ENERGIES] for one in members]) - painn(graph)[keys.ENERGIES]
    expected = FACTOR * of_atoms.square().mean(0).sqrt()
    np.testing.assert_allclose(prediction.energies_std, expected, rtol=1e-8)


def test_the_paper_s_members_can_still_be_drawn(painn):
    graph = painn.backbone.graph(FAR)
    plain = small("painn")
    expected = plain.member(0)(graph)[keys.ENERGY]
    assert torch.equal(painn.draw(1, method="frozen")[0](graph)[keys.ENERGY], expected)
