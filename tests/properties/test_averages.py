"""Error bars on averages against closed forms."""

import numpy as np
import pytest
import torch
from ase.build import bulk
from ase.units import kB

import blips
from blips.backbones import PaiNN
from blips.errors import InputError
from blips.properties.dynamics import (
    normalised_weights,
    radial_distribution,
    reweighted,
)


def test_weights_turn_one_gaussian_into_another():
    """Positions in a well k x^2 / 2 reweighted to a stiffer well have its variance kT / k'."""
    temperature, stiff, stiffer = 300.0, 1.0, 1.5
    x = np.random.default_rng(0).normal(scale=np.sqrt(kB * temperature / stiff), size=200_000)
    weights = normalised_weights(0.5 * (stiffer - stiff) * x**2, temperature)
    assert weights.sum() == pytest.approx(1.0)
    assert (weights * x**2).sum() == pytest.approx(kB * temperature / stiffer, rel=0.02)


def test_weights_survive_large_energies():
    assert normalised_weights(np.array([0.0, 1e6]), 10.0) == pytest.approx([1.0, 0.0])


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
