"""Covariance of forces in one pass."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import blips
from blips.backbones import PaiNN
from blips.errors import InputError
from blips.spread import ForceSpread
from blips.spread.distil import Lesson, fit_spread
from blips.spread.tensors import Ingredients, feature_names
from helpers import rattled_molecules


@pytest.fixture(scope="module")
def potential() -> blips.BayesianPotential:
    torch.manual_seed(0)
    backbone = PaiNN(cutoff=4.0, features=16, blocks=2, num_basis=6)
    return blips.bayesianize(backbone, bounds=(1e-6, 0.5), initial=0.01).double()


rattled = partial(rattled_molecules, scale=0.12)


@pytest.fixture(scope="module")
def taught(potential):
    potential.distil_forces(rattled(8), samples=48, seed=0)
    yield potential
    potential.force_spread = None


@pytest.mark.parametrize("axes", [False, True])
def test_the_weighted_sum_is_that_of_the_basis(potential, axes):
    found = Ingredients.of(potential.one_pass(rattled(3)), axes=axes)
    basis = found.basis()
    assert len(basis) == len(feature_names(found.shares.shape[1], axes))
    shape = basis.shape[1], len(basis)
    weights = torch.rand(shape, dtype=torch.float64, generator=torch.manual_seed(1))  # of each atom
    expected = torch.einsum("nb,bnij->nij", weights, basis)
    torch.testing.assert_close(found.covariance(weights), expected)


def test_weights_of_each_element_are_found_again():
    rng = np.random.default_rng(0)
    numbers = np.array([1, 8] * 40)
    roots = rng.normal(size=(80, len(feature_names(1)), 3, 3))
    basis = np.moveaxis(roots @ roots.swapaxes(-1, -2), 1, -1)  # [N, 3, 3, B], positive
    true = {z: rng.uniform(0.5, 2.0, size=basis.shape[-1]) for z in (1, 8)}
    cov = np.stack([tensors @ true[z] for tensors, z in zip(basis, numbers, strict=True)])
    spread = fit_spread([Lesson(0, 0.0, numbers, basis, cov)])
    for z in (1, 8):
        np.testing.assert_allclose(spread.of_elements[z], true[z], rtol=0.2)
    assert spread.weights not in spread.of_elements.values()
    rows = spread.of_atoms(torch.tensor([8, 1, 14]))  # no lesson had the last one
    expected = [spread.of_elements[8], spread.of_elements[1], spread.weights]
    np.testing.assert_array_equal(rows, expected)
    assert ForceSpread.from_dict(json.loads(json.dumps(spread.to_dict()))) == spread


def test_shares_add_up_to_the_variance_of_the_energy(potential):
    found = potential.one_pass(rattled(3))
    total = float(found.shares(4).sum())
    assert found.shares(4).shape == (13, 4)
    assert total == pytest.approx(float(found.attribution().energy_var.sum()))


@pytest.mark.statistical
def test_it_ranks_force_components_as_many_samples_do(taught):
    fresh = rattled(9, scale=0.2, first=50)
    sampled = taught.predict(fresh, samples=300, seed=9).forces_std
    found = taught.predict(fresh, method="onepass").forces_std
    assert spearmanr(found.ravel(), sampled.ravel()).statistic > 0.9
    assert np.median(found / sampled) == pytest.approx(1.0, abs=0.15)
    quality = taught.force_spread.quality
    assert quality["spearman"] > 0.9
    assert 0.5 < quality["far_spearman"] < 1.0
    assert quality["far_spearman"] != quality["spearman"]


def test_covariances_are_positive_and_turn_with_the_structure(taught):
    atoms = rattled(2)[1]
    before = taught.predict(atoms, method="onepass", covariance=True)
    assert np.linalg.eigvalsh(before.forces_cov).min() >= -1e-12
    np.testing.assert_allclose(
        before.forces_std**2, np.diagonal(before.forces_cov, axis1=1, axis2=2)
    )
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    atoms.positions = atoms.positions @ turn.T
    after = taught.predict(atoms, method="onepass", covariance=True).forces_cov
    np.testing.assert_allclose(after, turn @ before.forces_cov @ turn.T, atol=1e-10)


def test_twice_the_coefficients_twice_the_variance(taught, monkeypatch):
    atoms = rattled(1)[0]
    once = taught.predict(atoms, method="onepass").forces_std
    plain = type(taught).coefficients

    def doubled(self, graph):
        return {name: 2 * value for name, value in plain(self, graph).items()}

    monkeypatch.setattr(type(taught), "coefficients", doubled)
    twice = taught.predict(atoms, method="onepass").forces_std
    np.testing.assert_allclose(twice**2, 2 * once**2)


def test_without_lessons_there_is_no_deviation_of_forces(potential, tmp_path):
    spread, potential.force_spread = potential.force_spread, None
    assert potential.predict(rattled(1), method="onepass").forces_std is None
    with pytest.raises(InputError, match="no structures to learn from"):
        potential.distil_forces([])
    potential.force_spread = spread


def test_it_is_saved_with_the_model(taught, tmp_path):
    path = blips.save(taught, tmp_path / "model.safetensors")
    again = blips.load(path)
    assert again.force_spread == taught.force_spread
    atoms = rattled(1)
    expected = taught.predict(atoms, method="onepass").forces_std
    np.testing.assert_allclose(again.predict(atoms, method="onepass").forces_std, expected)


def test_weights_of_another_version_are_refused():
    with pytest.raises(InputError, match="another version"):
        ForceSpread(2, (1.0, 2.0), {})


def test_every_lesson_has_samples_of_its_own(potential, monkeypatch):
    def lessons_of(seed: int) -> list[Lesson]:
        seen: list[Lesson] = []

        def noted(lessons, refine):
            seen.extend(lessons)
            return fit_spread(lessons, refine)

        monkeypatch.setattr("blips.spread.distil.fit_spread", noted)
        potential.distil_forces(2 * rattled(1), samples=16, displacements=[], seed=seed)
        return seen

    first, second = lessons_of(0)
    np.testing.assert_array_equal(first.basis, second.basis)  # the same structure
    assert np.abs(first.cov / second.cov - 1).max() > 0.1
    np.testing.assert_array_equal(lessons_of(0)[1].cov, second.cov)
    assert np.abs(lessons_of(1)[1].cov / second.cov - 1).max() > 0.1
    potential.force_spread = None
