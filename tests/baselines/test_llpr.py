from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from blips import keys
from blips.backbones.derivatives import energy_and_derivatives
from blips.data.dataset import StructureData
from studies.baselines import LastLayerRigidity
from studies.baselines.last_layer import (
    energy_scale,
    gradient_of_each,
    last_layer,
    readout_of,
    summed_features,
)
from studies.baselines.llpr import Rigidity


def test_energies_and_forces_are_linear_in_the_features(painn, graph):
    summed, gradient = summed_features(painn, graph)
    last = readout_of(painn)[-1]
    outputs = energy_and_derivatives(lambda g: painn(g)[keys.ENERGIES], graph)
    weight = energy_scale(painn) * last.weight.detach()[0]
    shift = painn.reference.shift[graph.numbers] + energy_scale(painn) * last.bias.detach()
    assert_close(summed @ weight + graph.sum_over_structures(shift), outputs[keys.ENERGY])
    assert_close(-gradient @ weight, outputs[keys.FORCES])


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_one_by_one_are_those_of_one_batch(painn, graph, monkeypatch, create_graph):
    found = []
    for few in (0, 10**9):
        monkeypatch.setattr("studies.baselines.last_layer.FEW_ROWS", few)
        gradient = gradient_of_each(
            lambda g: last_layer(painn, g)[1].sum(dim=0), graph, 4, create_graph=create_graph
        )
        assert gradient.requires_grad == create_graph
        found.append(gradient.detach())
    assert_close(*found)
    assert found[0].shape == (4, graph.num_nodes, 3)


def test_the_form_is_that_of_bayesian_linear_regression():
    """Posterior of w ~ N(0, a^2/s^2 I) given y = F w + noise of variance a^2, by its textbook."""
    rng = np.random.default_rng(0)
    design, new = rng.normal(size=(20, 5)), rng.normal(size=(7, 5))
    alpha, sigma0 = 0.7, 1.3
    prior_precision = sigma0**2 / alpha**2 * np.eye(5)
    posterior = np.linalg.inv(prior_precision + design.T @ design / alpha**2)
    expected = np.einsum("rd,de,re->r", new, posterior, new)
    rigidity = Rigidity.of(torch.as_tensor(design.T @ design))
    form = rigidity.form(torch.as_tensor(new), torch.tensor([sigma0**2]).double())
    np.testing.assert_allclose(alpha**2 * form[:, 0], expected)
    cov = rigidity.covariance(torch.as_tensor(new), sigma0**2)
    np.testing.assert_allclose(alpha**2 * cov, new @ posterior @ new.T)


@pytest.mark.statistical
def test_the_scale_of_simulated_errors_is_found():
    generator = torch.Generator().manual_seed(0)
    design = torch.randn(8, 6, generator=generator).double()
    rows = torch.randn(20_000, 6, generator=generator).double()
    rigidity = Rigidity.of(design.T @ design)
    grid = rigidity.grid()
    true = grid[30]
    form = rigidity.form(rows, grid)
    var = 0.25 * form[:, 30]
    error = var.sqrt() * torch.randn(len(rows), generator=generator).double()
    alpha_square, sigma0_square = rigidity.best_scale(form, error)
    assert sigma0_square == pytest.approx(float(true), rel=0.01)
    assert alpha_square == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_predictions_are_the_explicit_formula(painn, structures, weight):
    data = [StructureData(s, 4.0, dtype=torch.float64) for s in structures]
    model = LastLayerRigidity(painn, forces_weight=weight)
    model.condition(*data)
    features, gradients = summed_features(painn, data[0].batch(range(12)).graph)
    rows = torch.cat([features, weight**0.5 * gradients.flatten(end_dim=1)])
    prediction = model.predict(structures[1])
    new, new_gradients = summed_features(painn, painn.graph(structures[1]))
    for name, queries in (("energy", new), ("forces", new_gradients.flatten(end_dim=1))):
        alpha_square, sigma0_square = model.scales[name]
        matrix = rows.T @ rows + sigma0_square * torch.eye(rows.shape[1]).double()
        var = alpha_square * (queries * torch.linalg.solve(matrix, queries.T).T).sum(1)
        std = getattr(prediction, f"{name}_std").ravel()
        np.testing.assert_allclose(std, var.sqrt(), rtol=1e-4)


def test_scales_are_optimal_on_validation_data(painn, structures):
    data = [StructureData(s, 4.0, dtype=torch.float64) for s in structures]
    model = LastLayerRigidity(painn)
    model.condition(*data)
    prediction = model.predict(structures[1])
    target = np.concatenate([atoms.get_forces() for atoms in structures[1]])
    z = (target - prediction.forces) / prediction.forces_std
    assert np.mean(z**2) == pytest.approx(1.0, rel=1e-6)


def test_deviations_turn_with_the_structure(painn, graph, structures):
    from blips.testing import rotation_matrix

    model = LastLayerRigidity(painn)
    model.condition(*(StructureData(s, 4.0, dtype=torch.float64) for s in structures))
    turn = rotation_matrix()
    turned = replace(graph, positions=graph.positions @ torch.as_tensor(turn).T)
    here, there = model.predict(graph), model.predict(turned)
    np.testing.assert_allclose(there.energy_std, here.energy_std)
    here, there = (
        model.rigidity.covariance(summed_features(painn, one)[1], 0.1).numpy()  # [N, 3, 3]
        for one in (graph, turned)
    )
    np.testing.assert_allclose(there, turn @ here @ turn.T, atol=1e-10)


def test_data_without_forces_give_energies_an_error_bar_only(painn, structures):
    train, valid = (
        StructureData(s, 4.0, quantities=["energy"], dtype=torch.float64) for s in structures
    )
    model = LastLayerRigidity(painn, forces_weight=0.0)
    model.condition(train, valid)
    prediction = model.predict(structures[1])
    assert prediction.forces_std is None
    assert (prediction.energy_std > 0).all()
