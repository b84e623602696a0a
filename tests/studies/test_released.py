"""Energies of released models: what is left after a fit per element."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

import blips
from blips.backbones import PaiNN
from blips.potential import BayesianPotential
from studies.released.energies import ElementShift, compositions, measure_energies

SHIFT = {6: -1.5, 8: 0.4}  # eV


@pytest.fixture(scope="module")
def potential() -> BayesianPotential:
    torch.manual_seed(0)
    return blips.bayesianize(PaiNN(cutoff=4.0, features=8))


def labelled(potential: BayesianPotential, count: int, noise: float) -> list[Atoms]:
    """Molecules whose labels are the model's energies, a shift per element, and noise an atom."""
    rng = np.random.default_rng(count)
    found = []
    for _ in range(count):
        numbers = rng.choice(list(SHIFT), size=rng.integers(2, 7))
        atoms = Atoms(numbers, positions=rng.normal(scale=2.0, size=(len(numbers), 3)))
        energy = float(potential.predict(atoms, method="map", forces=False).array("energy")[0])
        energy += sum(SHIFT[int(z)] for z in numbers) + len(atoms) * rng.normal(scale=noise)
        atoms.calc = SinglePointCalculator(atoms, energy=energy)
        found.append(atoms)
    return found


def test_the_fit_finds_the_shift_and_the_misfit(potential: BayesianPotential):
    shift = ElementShift.of(potential, labelled(potential, 200, 0.02))
    mean, std = shift.mean_and_std([Atoms("C"), Atoms("O"), Atoms("N")])
    np.testing.assert_allclose(mean, [-1.5, 0.4, 0.0], atol=0.01)
    assert shift.misfit == pytest.approx(0.02, rel=0.15)
    assert std[:2].max() < 0.01
    assert std[2] == pytest.approx(float(shift.fit.lambda_) ** -0.5, rel=1e-6)  # the prior


def test_energies_are_judged_per_atom_and_after_the_shift(potential: BayesianPotential):
    shift = ElementShift.of(potential, labelled(potential, 200, 0.02))
    structures = labelled(potential, 100, 0.02)
    prediction = potential.predict(structures, method="mc", samples=2, forces=False)
    means = potential.predict(structures, method="map", forces=False).array("energy")
    prediction = replace(prediction, energy=means, energy_std=np.full(len(means), 1e-6))
    found = {
        name: metric["value"]
        for name, metric in measure_energies(prediction, structures, shift).items()
    }
    assert found["E MAE"] == pytest.approx(0.02 * np.sqrt(2 / np.pi), rel=0.25)
    assert found["E within 90 %, with misfit"] == pytest.approx(0.9, abs=0.08)
    assert found["E within 90 %"] < 0.3
    assert found["E within 90 %, no shift"] == 0
    expected = np.abs(compositions(structures)[:, list(SHIFT)] @ list(SHIFT.values())).mean()
    assert found["E MAE, no shift"] == pytest.approx(expected, rel=0.05)
