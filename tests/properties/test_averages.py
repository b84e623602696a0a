"""Error bars on averages against closed forms."""

import numpy as np
import pytest
import torch
from ase.build import bulk
from ase.units import kB

import blips
from blips.backbones import PaiNN
from blips.errors import InputError
from blips.prediction import Prediction
from blips.properties.dynamics import radial_distribution, reweighted


class Well:
    """A potential of frames that are positions, k x^2 / 2, with one member."""

    def __init__(self, stiffness, member=None):
        self.stiffness, self.member = stiffness, member

    def predict(self, frames, **_):
        return Prediction(np.ones(len(frames)), "map", 0, energy=0.5 * self.stiffness * frames**2)

    def draw(self, count, seed):
        return [self.member]


def test_weights_turn_one_gaussian_into_another():
    """Positions in a well k x^2 / 2 reweighted to a stiffer well have its variance kT / k'."""
    temperature, stiff, stiffer = 300.0, 1.0, 1.5
    x = np.random.default_rng(0).normal(scale=np.sqrt(kB * temperature / stiff), size=200_000)
    found, effective = reweighted(Well(stiff, Well(stiffer)), x, x**2, temperature)
    assert found == pytest.approx([kB * temperature / stiffer], rel=0.02)
    # (sum w)^2 / sum w^2 = T <w>^2 / <w^2> with w = exp(-a x^2), <w^2> = (1 + 2 a)^(-1/2)
    assert effective == pytest.approx([200_000 * np.sqrt(2.0) / 1.5], rel=0.02)


def test_weights_survive_large_energies():
    x = np.array([0.0, 1e3])
    found, effective = reweighted(Well(1.0, Well(3.0)), x, np.array([5.0, 7.0]), 10.0)
    assert (found, effective) == (pytest.approx([5.0]), pytest.approx([1.0]))


def test_reweighting_of_frames():
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(cutoff=4.0, features=8, blocks=1), initial=1e-3)
    frames = []
    for k in range(12):
        atoms = bulk("Cu", cubic=True)
        atoms.rattle(0.05, seed=k)
        frames.append(atoms)
    hot, effective = reweighted(potential, frames, lambda a: a.positions[0, 0], 1e9, members=3)
    x = np.array([a.positions[0, 0] for a in frames])
    assert hot == pytest.approx(np.full(3, x.mean()), abs=1e-6)  # every weight the same
    assert effective == pytest.approx(np.full(3, 12.0), rel=1e-4)
    cold, effective = reweighted(
        potential, frames, lambda a: radial_distribution(a, 5.0, 20), 300.0, members=3
    )
    assert cold.shape == (3, 20)
    assert (effective > 1).all()
    assert cold.std(axis=0).max() > 0
    with pytest.raises(InputError, match="temperature"):
        reweighted(potential, frames, lambda a: 0.0, 0.0)


def test_radial_distribution_counts_the_shells_of_a_crystal():
    copper = bulk("Cu", a=3.6, cubic=True)
    found = radial_distribution(copper, largest=4.0, bins=40)
    shells = 4 / 3 * np.pi * np.diff(np.linspace(0, 4.0, 41) ** 3)
    neighbours = found * shells * len(copper) / copper.get_volume()
    assert neighbours[25] == pytest.approx(12)  # at a / sqrt(2) = 2.546 A
    assert neighbours[36] == pytest.approx(6) or neighbours[35] == pytest.approx(6)  # at a
    assert neighbours.sum() == pytest.approx(18)
    copper.pbc = False
    with pytest.raises(InputError, match="periodic"):
        radial_distribution(copper, 4.0, 10)
