"""Standard deviations of a conditioned potential: never nothing, and wide for unknown elements."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

from blips import keys
from blips.inference.posterior import ConditionedPosterior
from inference.conditioning import (
    EXACT,
    FACTOR,
    FAR,
    FLOOR,
    OWN,
    TAU,
    TRAIN,
    VALID,
    all_rows,
    conditioned,
    gram_of,
    predict,
    rescaled,
)
from inference.models import (
    labelled,
    small,
)

# The packages behind CHGNet and ORB.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def extremes() -> list[Atoms]:
    """A crystal without forces, an atom, a close pair, a far pair, a rattled molecule."""
    return [
        bulk("C", "diamond", a=3.6),
        Atoms("H"),
        Atoms("O2", [[0, 0, 0], [0, 0, 0.4]]),
        Atoms("N2", [[0, 0, 0], [0, 0, 9.0]]),
        FAR[0],
    ]


@pytest.mark.parametrize("scale", ["fitted", "given"])
@OWN
def test_total_deviations_are_positive_everywhere(name: str, scale: str):
    potential = small(name)
    potential.condition(TRAIN, valid=VALID)
    if scale == "given":
        rescaled(potential, relative_ratio=1e-10)
    for prediction in (
        predict(potential, extremes(), samples=2),
        predict(potential, TRAIN, samples=2),  # seen already
    ):
        for quantity in ("energy", "forces"):
            total = getattr(prediction, f"{quantity}_total_std")
            assert np.isfinite(total).all()
            assert (total > 0).all()


def test_forces_have_a_floor_where_only_energies_are_labelled():
    potential = small("painn")
    potential.condition(TRAIN, valid=labelled(FAR, forces=False))
    assert (predict(potential, extremes(), samples=2).forces_total_std > 0).all()


def test_forces_that_vanish_have_the_floor(potential):
    crystal = predict(potential, bulk("C", "diamond", a=3.6), samples=8)
    np.testing.assert_allclose(crystal.forces, 0.0, atol=1e-10)
    np.testing.assert_allclose(crystal.forces_std, 0.0, atol=1e-10)
    np.testing.assert_allclose(crystal.forces_total_std, FLOOR[keys.FORCES], rtol=1e-12)


def test_floors_are_the_aleatoric_part(potential):
    prediction = predict(potential, FAR, samples=4)
    np.testing.assert_array_equal(prediction.forces_aleatoric_std, FLOOR[keys.FORCES])
    atoms = np.array([len(one) for one in FAR])
    np.testing.assert_allclose(prediction.energy_aleatoric_std, FLOOR[keys.ENERGY] * atoms)
    for quantity in ("energy", "forces"):
        parts = [getattr(prediction, f"{quantity}{part}_std") for part in ("", "_aleatoric")]
        total = np.sqrt(parts[0] ** 2 + parts[1] ** 2)
        np.testing.assert_allclose(getattr(prediction, f"{quantity}_total_std"), total)


def test_floors_and_factor_leave_the_epistemic_part_of_forces(painn):
    plain = copy.deepcopy(painn)
    scale = replace(painn.posterior.scale, floor={}, energy_factor=1.0)
    plain.posterior = replace(painn.posterior, scale=scale)
    here, there = (predict(p, FAR, samples=3) for p in (painn, plain))
    np.testing.assert_allclose(here.forces_std, there.forces_std, rtol=1e-12)
    np.testing.assert_allclose(here.energy_std, FACTOR * there.energy_std, rtol=1e-12)
    np.testing.assert_allclose(here.energies_std, FACTOR * there.energies_std, rtol=1e-12)
    assert there.forces_aleatoric_std is None


def test_energies_alone_have_the_same_deviations(painn):
    both, alone = (predict(painn, FAR, samples=4, forces=forces) for forces in (True, False))
    np.testing.assert_allclose(alone.energy_std, both.energy_std, rtol=1e-12)
    assert alone.forces is None
    assert (alone.energies_std > 0).all()


def test_one_pass_has_the_deviations_of_energies(painn):
    one = painn.predict(FAR, method="onepass")
    full = predict(painn, FAR, samples=64)
    # 64 draws for the energy, where `full` is exact: five standard errors of 1 / sqrt(128)
    np.testing.assert_allclose(one.energy_std, full.energy_std, rtol=5 / np.sqrt(128))
    np.testing.assert_allclose(one.energies_std, full.energies_std, rtol=1e-9)
    np.testing.assert_array_equal(one.forces, full.forces)
    assert one.forces_std is None


def test_batches_do_not_matter(painn):
    many, one = (predict(painn, FAR, samples=3, batch_size=size) for size in (8, 1))
    for quantity in ("energy_std", "energies_std", "forces_std", "forces_aleatoric_std"):
        np.testing.assert_allclose(getattr(many, quantity), getattr(one, quantity), rtol=1e-9)


def test_predictions_work_where_gradients_are_off(painn):
    expected = predict(painn, FAR, samples=2).forces_std
    with torch.no_grad():
        found = predict(painn, FAR, samples=2).forces_std
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("maps", ["readout", "all"])
def test_weights_need_not_be_trainable(maps: str):
    plain, frozen = small("painn"), small("painn").requires_grad_(False)
    for potential in (plain, frozen):
        potential.condition(TRAIN, valid=VALID, maps=maps, dimension=64)
    torch.testing.assert_close(gram_of(frozen), gram_of(plain), **EXACT)


@pytest.mark.parametrize("maps", ["readout", "all"])
def test_single_precision_gives_the_same_to_its_digits(maps: str):
    """It has compiled messages, which cannot be differentiated twice."""
    double, single = small("painn"), small("painn", torch.float32)
    double.condition(TRAIN, valid=VALID, maps=maps, dimension=64)
    rescaled(double)
    single.posterior = double.posterior
    one, other = (predict(p, FAR, samples=4) for p in (double, single))
    np.testing.assert_allclose(other.energy_std, one.energy_std, rtol=1e-3)
    np.testing.assert_allclose(other.forces_std, one.forces_std, rtol=1e-3)
    single.posterior = None
    single.condition(TRAIN, valid=VALID, maps=maps, dimension=64)
    gram = gram_of(double)
    torch.testing.assert_close(gram_of(single), gram, rtol=0.0, atol=1e-5 * float(gram.max()))


# ---- elements that were not seen ----


def test_an_unknown_element_has_the_deviation_of_the_prior(potential):
    unknown = molecule("SiH4")
    with pytest.warns(UserWarning, match="have no Si"):
        prediction = predict(potential, [FAR[0], unknown, FAR[1]], samples=4)
    rows = all_rows(potential, unknown)
    expected = FACTOR * TAU * float(rows[0].norm())
    assert prediction.energy_std[1] == pytest.approx(expected, rel=1e-12)
    known = predict(potential, [FAR[0], FAR[1]], samples=4)
    np.testing.assert_allclose(prediction.energy_std[[0, 2]], known.energy_std, rtol=1e-9)
    np.testing.assert_allclose(prediction[0].forces_std, known[0].forces_std, rtol=1e-9)
    v = potential.posterior.prior_draws(4)
    of_prior = (v @ rows[1:].T).square().mean(0).sqrt().view(-1, 3)
    np.testing.assert_allclose(prediction[1].forces_std, of_prior, rtol=1e-8, atol=1e-15)


def test_an_unknown_element_without_forces(painn):
    with pytest.warns(UserWarning, match="have no Si"):
        alone = predict(painn, molecule("SiH4"), samples=4, forces=False)
    with pytest.warns(UserWarning, match="have no Si"):
        both = predict(painn, molecule("SiH4"), samples=4)
    np.testing.assert_allclose(alone.energy_std, both.energy_std, rtol=1e-12)


@pytest.mark.parametrize("kept", ["evidence", "draws"])
def test_an_unknown_element_in_one_pass(painn, kept: str):
    potential = copy.deepcopy(painn)
    if kept == "draws":
        potential.posterior = painn.posterior.only_draws(64)
    with pytest.warns(UserWarning, match="have no Si"):
        one = potential.predict(molecule("SiH4"), method="onepass")
    with pytest.warns(UserWarning, match="have no Si"):
        full = predict(potential, molecule("SiH4"), samples=64)
    np.testing.assert_allclose(one.energy_std, full.energy_std, rtol=5 / np.sqrt(128))
    np.testing.assert_allclose(one.energies_std, full.energies_std, rtol=1e-9)


def test_an_element_is_known_once_it_was_seen():
    potential = conditioned()
    with pytest.warns(UserWarning, match="have no Si"):
        before = predict(potential, molecule("SiH4"), samples=2)
    potential.condition([molecule("SiH4")])
    assert predict(potential, molecule("SiH4"), samples=2).energy_std < before.energy_std


def test_a_relative_misfit_is_part_of_the_aleatoric_std(painn):
    graph = painn.backbone.graph(TRAIN[0])
    posterior = painn.posterior
    before = painn.predict(graph)
    painn.posterior = replace(posterior, scale=replace(posterior.scale, relative=0.3))
    try:
        found = painn.predict(graph)
    finally:
        painn.posterior = posterior
    np.testing.assert_array_equal(found.forces_std, before.forces_std)
    floor = posterior.scale.floor["forces"]
    expected = np.sqrt(floor**2 + (0.3 * found.forces) ** 2)
    np.testing.assert_allclose(found.forces_aleatoric_std, expected, rtol=1e-12)
    kept = replace(posterior, scale=replace(posterior.scale, relative=0.3))
    again = ConditionedPosterior.from_dict(kept.to_dict(), kept.tensors())
    assert again.scale == kept.scale


def test_atoms_outside_of_the_domain_have_the_typical_force_as_misfit(painn):
    structures = [TRAIN[0], TRAIN[0].copy()]
    structures[1].positions[-1] += 10.0  # its last atom has no neighbour
    posterior = painn.posterior
    scale = replace(posterior.scale, relative=0.3, typical=0.5)
    painn.posterior = replace(posterior, scale=scale)
    try:
        inside, outside = painn.predict(structures)
    finally:
        painn.posterior = posterior
    assert inside.in_domain.all()
    assert outside.in_domain.tolist() == [True] * (len(TRAIN[0]) - 1) + [False]
    for found, typical in ((inside, 0.0), (outside, 0.5 * ~outside.in_domain[:, None])):
        expected = scale.floor["forces"] ** 2 + (0.3 * found.forces) ** 2 + typical**2
        np.testing.assert_allclose(found.forces_aleatoric_std**2, expected, rtol=1e-12)
    kept = replace(posterior, scale=scale)
    assert ConditionedPosterior.from_dict(kept.to_dict(), kept.tensors()).scale == scale
