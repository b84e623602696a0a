"""The scale of a conditioned posterior, as labels decide it."""

from dataclasses import replace

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator

import blips
from blips import keys
from blips.inference.scale import RELATIVE_RATIOS, fit_floor
from helpers import morse_ammonia, rattled_molecules
from inference.conditioning import FACTOR, FLOOR, TRAIN, VALID, conditioned, predict
from inference.models import (
    labelled,
    small,
)

# The packages behind CHGNet and ORB.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def test_the_scale_is_in_units_of_the_rows_and_the_floor_is_what_the_factor_leaves():
    potential = small("painn")
    potential.condition(TRAIN, valid=VALID)
    posterior = potential.conditioned()
    assert posterior.evidence is not None
    assert posterior.spectrum is not None
    scale, factor = posterior.scale, posterior.scale.energy_factor
    ratios = RELATIVE_RATIOS * posterior.evidence.mean_square
    assert np.abs(ratios / scale.ratio - 1.0).min() < 1e-9
    linearised = potential.linear_model()(potential.backbone.graph(VALID), depth="energies")
    known = posterior.scale.ratio, posterior.scale.scale
    var = posterior.spectrum.var(linearised.energy_rows(), *known).numpy()
    truth = [atoms.get_potential_energy() for atoms in VALID]
    error = linearised.outputs[keys.ENERGY].numpy() - np.array(truth)
    sizes = np.array([float(len(atoms)) for atoms in VALID])
    floors = [fit_floor(power * var, error, sizes) for power in (factor**2, factor**3, 1.0)]
    assert scale.floor[keys.ENERGY] == pytest.approx(floors[0], rel=1e-6)
    assert floors[0] not in floors[1:], "these labels cannot tell"


def labelled_by_draws(potential, structures: list[Atoms], seed: int) -> list[Atoms]:
    """Each has the labels of a member of its own, and the noise of the floors."""
    rng = np.random.default_rng(seed)
    for k, atoms in enumerate(structures):
        outputs = potential.member(0, seed=1000 * seed + k)(potential.backbone.graph(atoms))
        plain = potential(potential.backbone.graph(atoms))[keys.ENERGY]
        energy = float(plain + FACTOR * (outputs[keys.ENERGY] - plain))
        energy += FLOOR[keys.ENERGY] * len(atoms) * rng.normal()
        noise = FLOOR[keys.FORCES] * rng.normal(size=(len(atoms), 3))
        forces = outputs[keys.FORCES].numpy() + noise
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
    return structures


@pytest.mark.statistical
def test_labels_of_the_posterior_itself_have_the_errors_that_are_predicted():
    """40 structures to fit and 40 to test: root mean square of error / sigma within 25 %."""
    potential = conditioned()
    scale = replace(potential.posterior.scale, scale=30.0)
    potential.posterior = replace(potential.posterior, scale=scale)
    valid = labelled_by_draws(potential, rattled_molecules(40, 0.15, first=100), 1)
    test = labelled_by_draws(potential, rattled_molecules(40, 0.15, first=200), 2)
    potential.posterior = None
    fitted = potential.condition(TRAIN, valid=valid).scale
    prediction = predict(potential, test, samples=64)
    forces = np.concatenate([atoms.get_forces() for atoms in test])
    z = (forces - prediction.forces) / prediction.forces_total_std
    assert np.sqrt(np.mean(z**2)) == pytest.approx(1.0, rel=0.25)
    energy = np.array([atoms.get_potential_energy() for atoms in test])
    z = (energy - prediction.energy) / prediction.energy_total_std
    assert np.sqrt(np.mean(z**2)) == pytest.approx(1.0, rel=0.35)
    assert fitted.floor[keys.FORCES] == pytest.approx(FLOOR[keys.FORCES], rel=0.4)


def test_forces_that_vanish_by_symmetry_do_not_decide_the_scale():
    plain, crystals = small("painn"), []
    for k in range(4):
        crystal = bulk("Si", a=5.3 + 0.05 * k)
        energy = float(plain.predict(crystal, method="map").energy[0])
        crystal.calc = SinglePointCalculator(crystal, energy=energy, forces=np.zeros((2, 3)))
        crystals.append(crystal)
    train, valid = [*morse_ammonia(6, 0), bulk("Si")], morse_ammonia(4, 1)
    expected = small("painn").condition(train, valid=valid).scale
    found = small("painn").condition(train, valid=[*valid, *crystals]).scale
    assert found.floor[keys.FORCES] == pytest.approx(expected.floor[keys.FORCES], rel=0.05)
    assert found.scale == pytest.approx(expected.scale, rel=0.5)


def test_labels_can_have_other_names_and_units():
    other = []
    for atoms in VALID:
        one = atoms.copy()
        one.info["e"] = 1000 * atoms.get_potential_energy()
        one.arrays["f"] = 1000 * atoms.get_forces()
        other.append(one)
    labels = blips.data.labels.Labels(energy_key="e", forces_key="f", energy_unit="meV")
    found = small("painn").condition(TRAIN, valid=other, labels=labels).scale
    expected = small("painn").condition(TRAIN, valid=VALID).scale
    assert found.scale == pytest.approx(expected.scale, rel=1e-6)
    assert found.floor == pytest.approx(expected.floor, rel=1e-6)


def test_energies_alone_are_enough_for_a_scale():
    energies = labelled(rattled_molecules(4, 0.1, first=20), forces=False)
    scale = small("painn").condition(TRAIN, valid=energies).scale
    assert set(scale.floor) == {keys.ENERGY, keys.FORCES}
    assert scale.scale > 0


def test_errors_in_proportion_to_forces_set_the_misfit_of_lonely_atoms():
    """Labels are the model's own forces, a third too large: all that is wrong is their size."""
    potential, valid = small("painn"), rattled_molecules(8, 0.2, first=300)
    forces = []
    for atoms in valid:
        plain = potential.predict(atoms, method="map")
        energy, own = float(plain.energy[0]), plain.array("forces")
        atoms.calc = SinglePointCalculator(atoms, energy=energy + 0.01, forces=1.3 * own)
        forces.append(own)
    scale = potential.condition(TRAIN, valid=valid).scale
    assert scale.relative == pytest.approx(0.3, rel=0.2)
    assert scale.typical == pytest.approx(np.sqrt(np.mean(np.concatenate(forces) ** 2)), rel=0.1)


def test_forces_alone_leave_energies_at_the_scale_of_forces():
    valid = [atoms.copy() for atoms in VALID]
    for atoms, known in zip(valid, VALID, strict=True):
        atoms.calc = SinglePointCalculator(atoms, forces=known.get_forces())
    scale = small("painn").condition(TRAIN, valid=valid).scale
    assert scale.energy_factor == 1.0
    assert set(scale.floor) == {keys.FORCES}
