import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from blips.config import TrainingConfig
from blips.data.dataset import StructureData
from studies.baselines import MeanVariance
from studies.baselines.second_readout import VAR_FLOOR, Gaussian


@given(std=st.floats(1e-3, 1e3), error=st.floats(-10, 10), factor=st.floats(0.1, 30.0))
def test_the_loss_is_the_negative_log_likelihood(std, error, factor):
    gaussian = Gaussian(torch.tensor(std, dtype=torch.float64) ** 2)
    error = torch.tensor(error, dtype=torch.float64)
    expected = -torch.distributions.Normal(0.0, gaussian.aleatoric_var.sqrt()).log_prob(error)
    assert_close(gaussian.loss(error), expected)
    rescaled = gaussian.rescaled(factor).loss(error * factor)
    assert_close(rescaled, expected + math.log(factor))


def test_variances_of_atoms_add_up_to_that_of_the_energy(painn, graph):
    numbers = torch.randn(16, 2, dtype=torch.float64)
    found = MeanVariance(painn).distributions(numbers, graph)
    by_atom = 4.0 * numbers.exp() + VAR_FLOOR  # energy scale 2 eV
    assert_close(found["energy"].aleatoric_var, by_atom[:, 0].reshape(4, 4).sum(1))
    assert_close(found["forces"].aleatoric_var, by_atom[:, 1:])


def test_the_deviation_is_aleatoric_and_equal_for_all_components(painn, structures):
    prediction = MeanVariance(painn).predict(structures[0])
    assert prediction.forces_std is None
    assert prediction.energy_std is None
    np.testing.assert_array_equal(prediction.forces_total_std, prediction.forces_aleatoric_std)
    assert (np.ptp(prediction.forces_aleatoric_std, axis=1) == 0).all()
    assert np.ptp(prediction.forces_aleatoric_std) > 0


def test_loss_terms_have_weights_units_and_energies_per_atom(painn, structures):
    model = MeanVariance(painn)
    batch = StructureData(structures[0], 4.0, dtype=torch.float64).batch(range(5))

    def terms(**options):
        found = model.loss_terms(batch, TrainingConfig(**options), {"create_graph": True})
        return {name: float(term.detach()) for name, term in found.items()}

    weights = {"energy": 0.5, "forces": 2.0}
    plain, weighted = terms(weights={"energy": 1.0, "forces": 1.0}), terms(weights=weights)
    assert weighted == pytest.approx({name: weights[name] * plain[name] for name in plain})
    in_mev = terms(weights={"energy": 1.0, "forces": 1.0}, loss_unit="meV")
    assert in_mev == pytest.approx({name: plain[name] + math.log(1e3) for name in plain})
    per_atom = terms(weights={"energy": 1.0, "forces": 0.0}, energy_per_atom=True)
    assert per_atom == pytest.approx({"energy": plain["energy"] - math.log(4)})


def test_training_reaches_backbone_and_head(painn, structures):
    model = MeanVariance(painn)
    batch = StructureData(structures[0], 4.0, dtype=torch.float64).batch(range(5))
    terms = model.loss_terms(batch, TrainingConfig(), {"forces": True, "create_graph": True})
    sum(terms.values()).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None]
    assert not without
    assert all(p.grad.abs().sum() > 0 for p in model.head.parameters())
