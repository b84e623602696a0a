"""A posterior that was kept as draws alone, and what is made of draws."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from blips import keys
from blips.errors import CheckpointError, InputError
from blips.inference.conditioned import predict_conditioned
from blips.inference.posterior import ConditionedPosterior
from blips.inference.sampling import Request
from inference.conditioning import (
    EXACT,
    FACTOR,
    FAR,
    all_rows,
    predict,
)

# The packages behind CHGNet and ORB.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def test_draws_alone_are_enough_for_predictions(painn):
    small_copy = copy.deepcopy(painn)
    small_copy.posterior = painn.posterior.only_draws(8)
    one, other = (predict(p, FAR, samples=8) for p in (painn, small_copy))
    np.testing.assert_allclose(other.forces_std, one.forces_std, rtol=1e-5)
    members = predict(painn, FAR, samples=8)
    of_draws = small_copy.posterior.draws(8) @ torch.stack([all_rows(painn, a)[0] for a in FAR]).T
    expected = FACTOR * of_draws.square().mean(0).sqrt()
    np.testing.assert_allclose(other.energy_std, expected, rtol=1e-6)
    np.testing.assert_array_equal(other.energy, members.energy)


def test_draws_alone_are_restored_from_what_a_file_keeps(painn):
    posterior = painn.posterior.only_draws(8)
    again = ConditionedPosterior.from_dict(posterior.to_dict(), posterior.tensors())
    assert torch.equal(again.draws(8), posterior.draws(8))
    assert again.to_dict() == posterior.to_dict()


def test_draws_alone_are_no_more_than_they_are(painn):
    small_copy = copy.deepcopy(painn)
    small_copy.posterior = painn.posterior.only_draws(4)
    with pytest.raises(InputError, match="at most 4 samples"):
        predict(small_copy, FAR, samples=5)
    with pytest.raises(InputError, match="nothing can be added"):
        small_copy.condition(FAR)


@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_draws_of_another_size_are_refused(painn, shape):
    posterior = painn.posterior.only_draws(4)
    with pytest.raises(CheckpointError, match="do not fit"):
        ConditionedPosterior.from_dict(posterior.to_dict(), {"draws": torch.zeros(shape)})


def test_draws_alone_have_other_seeds(painn):
    """Orthonormal mixtures: other draws, with the covariance of those that were kept."""
    posterior = painn.posterior.only_draws(4)
    kept, mixed = posterior.draws(4), posterior.draws(4, seed=1)
    assert torch.equal(kept, posterior.kept_draws.double())
    assert not torch.allclose(mixed, kept)
    torch.testing.assert_close(mixed.T @ mixed, kept.T @ kept, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(posterior.draws(2, seed=1), mixed[:2], **EXACT)


def test_weight_noise_is_made_once_for_all_numbers_of_draws(painn):
    posterior = replace(painn.posterior)
    many = posterior.weight_noise(16, 0, torch.float64)
    few = posterior.weight_noise(4, 0, torch.float64)
    expected = posterior.maps.sketch.gather(posterior.draws(4, 0))
    for name, value in few.items():
        assert value.data_ptr() == many[name].data_ptr()
        torch.testing.assert_close(value, expected[name], **EXACT)
    other = posterior.weight_noise(4, 1, torch.float64)
    assert not any(torch.equal(other[name], value) for name, value in few.items())


def test_draws_are_of_seed_zero_unless_asked_otherwise(painn):
    posterior, graph = painn.posterior, painn.backbone.graph(FAR)
    for make in (posterior.draws, posterior.prior_draws):
        assert torch.equal(make(3), make(3, seed=0))
        assert not torch.equal(make(3), make(3, seed=1))
    assert torch.equal(posterior.only_draws(3).draws(3), posterior.draws(3).float().double())
    found = predict_conditioned(painn, graph, Request(samples=2))
    expected = predict(painn, FAR, samples=2, seed=0)
    np.testing.assert_array_equal(found.forces_std, expected.forces_std)
    assert found.stress is None
    assert found.samples == 2


def test_energies_of_atoms_are_by_64_draws_where_they_cost_little(painn):
    graph = painn.backbone.graph(FAR)
    noise = painn.posterior.weight_noise(64, 0, torch.float64)
    changes = painn.linear_model()(graph, depth="energies").energy_changes(noise)
    expected = FACTOR * changes[keys.ENERGIES].square().mean(0).sqrt()
    for options in ({"samples": 0}, {"samples": 8, "forces": False}):
        found = predict_conditioned(painn, graph, Request(**options))
        np.testing.assert_allclose(found.energies_std, expected, rtol=1e-9)


def test_kept_draws_are_enough_for_energies(painn):
    potential = copy.deepcopy(painn)
    potential.posterior = painn.posterior.only_draws(3)
    graph = painn.backbone.graph(FAR)
    few, many = (
        predict_conditioned(potential, graph, Request(samples=samples, forces=False))
        for samples in (2, 8)
    )
    np.testing.assert_array_equal(few.energy_std, many.energy_std)
    with pytest.raises(InputError, match="8 draws were asked for"):
        predict_conditioned(potential, graph, Request(samples=8))


def test_the_summary_has_the_misfit_in_words(painn):
    posterior = painn.posterior
    assert "conditioned on 5 structures" in str(posterior)
    assert "of the force" not in str(posterior)
    relative = replace(posterior, scale=replace(posterior.scale, relative=0.25))
    assert "and 25 % of the force" in str(relative)
