import math

import numpy as np
import pytest
import scoringrules
import torch

from blips.config import load_config
from blips.train.loss import Anchor, conditional_huber, data_loss, huber, sample_crps, sample_nll
from blips.units import KCAL_PER_MOL


def config(**training):
    return load_config({"training": training}).training


def outputs_and_targets():
    torch.manual_seed(0)
    targets = {"energy": torch.randn(2), "forces": torch.randn(5, 3)}
    outputs = {name: torch.randn(1, *t.shape) for name, t in targets.items()}
    return outputs, targets, torch.tensor([2, 3])


def test_mae_is_weighted_and_in_the_chosen_unit():
    outputs, targets, counts = outputs_and_targets()
    settings = config(loss="mae", loss_unit="kcal/mol", weights={"energy": 0.1, "forces": 2.0})
    terms = data_loss(outputs, targets, counts, settings)
    energy = (outputs["energy"] - targets["energy"]).abs().mean() / KCAL_PER_MOL
    forces = (outputs["forces"] - targets["forces"]).abs().mean() / KCAL_PER_MOL
    torch.testing.assert_close(terms["energy"], 0.1 * energy.double())
    torch.testing.assert_close(terms["forces"], 2.0 * forces.double())


def test_energy_per_atom_and_zero_weights():
    outputs, targets, counts = outputs_and_targets()
    settings = config(loss="mse", energy_per_atom=True, weights={"energy": 1.0, "forces": 0.0})
    terms = data_loss(outputs, targets, counts, settings)
    expected = (((outputs["energy"] - targets["energy"]) / counts) ** 2).mean()
    assert list(terms) == ["energy"]
    torch.testing.assert_close(terms["energy"], expected.double())


def test_huber_joins_parabola_and_line_smoothly():
    error = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    value = huber(error, 0.5)
    torch.testing.assert_close(value.tolist(), [0.875, 0.125, 0.0, 0.125, 0.875])
    slope = torch.autograd.grad(value.sum(), error)[0]
    torch.testing.assert_close(slope.tolist(), [-0.5, -0.5, 0.0, 0.5, 0.5])
    torch.testing.assert_close(
        huber(error, 0.5),
        torch.nn.functional.huber_loss(error, torch.zeros_like(error), delta=0.5, reduction="none"),
    )


def test_conditional_huber_counts_large_forces_less():
    error = torch.full((1, 1, 3), 0.5)
    losses = []
    for norm in (0.5, 1.5, 2.5, 10.0):
        target = torch.tensor([[norm, 0.0, 0.0]])
        losses.append(float(conditional_huber(target + error, target, 0.1)))
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == pytest.approx(float(huber(torch.tensor(0.5), 0.1)))
    assert losses[3] == pytest.approx(float(huber(torch.tensor(0.5), 0.01)))


def test_crps_of_samples_is_the_fair_estimator():
    rng = np.random.default_rng(0)
    samples, target = rng.normal(size=(7, 4)), rng.normal(size=4)
    expected = scoringrules.crps_ensemble(target, samples.T, estimator="fair").mean()
    assert float(sample_crps(torch.tensor(samples), torch.tensor(target))) == pytest.approx(
        expected
    )


@pytest.mark.statistical
def test_crps_and_nll_of_many_samples_tend_to_the_gaussian_closed_forms():
    generator = torch.Generator().manual_seed(0)
    samples = 1.0 + 2.0 * torch.randn(4000, 50, generator=generator, dtype=torch.float64)
    target = torch.full((50,), 2.0, dtype=torch.float64)
    crps = float(scoringrules.crps_normal(2.0, 1.0, 2.0))
    assert float(sample_crps(samples, target)) == pytest.approx(crps, abs=0.01)
    nll = 0.5 * (math.log(2 * math.pi * 4.0) + 0.25)
    assert float(sample_nll(samples, target)) == pytest.approx(nll, abs=0.01)


def test_crps_is_least_for_the_right_spread():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 20000, generator=generator, dtype=torch.float64)
    target = torch.randn(20000, generator=generator, dtype=torch.float64)
    losses = {scale: float(sample_crps(scale * noise, target)) for scale in (0.3, 1.0, 3.0)}
    assert losses[1.0] < min(losses[0.3], losses[3.0])


def test_nll_of_few_samples_has_the_unbiased_variance():
    samples = torch.tensor([[1.0], [2.0], [6.0]], dtype=torch.float64)
    target = torch.tensor([5.0], dtype=torch.float64)
    var = 7.0 + 1e-6
    expected = 0.5 * (math.log(2 * math.pi * var) + 4.0 / var)
    assert float(sample_nll(samples, target)) == pytest.approx(expected, rel=1e-12)


def test_a_quantity_of_the_users_own_has_weight_one():
    targets = {"charges": torch.tensor([1.0, 2.0])}
    outputs = {"charges": torch.tensor([[1.5, 2.5]])}
    terms = data_loss(outputs, targets, torch.tensor([2]), config(loss="mae"))
    assert float(terms["charges"]) == pytest.approx(0.5)


def test_the_anchor_of_a_tensor_that_began_as_zeros_is_its_mean_square():
    model = torch.nn.Linear(2, 2)
    torch.nn.init.zeros_(model.bias)
    anchor = Anchor(model)
    with torch.no_grad():
        model.bias += 0.3
    assert float(anchor.penalty().detach()) == pytest.approx(0.09 / 2)  # of two tensors


def test_the_anchor_is_relative_to_the_size_of_each_tensor():
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(2.0)
    anchor = Anchor(model)
    with torch.no_grad():
        model.weight += 0.1
        model.bias += 1.0
    assert float(anchor.penalty().detach()) == pytest.approx((0.01 / 0.25 + 1.0 / 4.0) / 2)


def test_conditional_huber_has_steps_at_one_two_and_three():
    norms = (0.9, 1.1, 1.9, 2.1, 2.9, 3.1)
    target = torch.tensor([[0.0, norm, 0.0] for norm in norms])
    error = torch.linspace(0.5, 2.0, 18).view(1, 6, 3)
    deltas = 0.2 * torch.tensor([1.0, 0.7, 0.7, 0.4, 0.4, 0.1])
    expected = torch.stack([huber(error[0, k], float(deltas[k])).mean() for k in range(6)]).mean()
    torch.testing.assert_close(conditional_huber(target + error, target, 0.2), expected)


def test_conditional_huber_of_tensors_goes_by_their_rows_and_of_scalars_is_plain():
    target = torch.tensor([[[5.0, 0, 0], [0, 0.5, 0], [0, 0, 0.5]]])
    error = torch.full((1, 1, 3, 3), 0.5)
    rows = [huber(torch.tensor(0.5), delta) for delta in (0.02, 0.2, 0.2)]
    expected = torch.stack(rows).mean()
    torch.testing.assert_close(conditional_huber(target + error, target, 0.2), expected)
    scalars = torch.tensor([5.0, 7.0])
    found = conditional_huber(scalars + torch.tensor([[0.5, 0.1]]), scalars, 0.2)
    torch.testing.assert_close(found, huber(torch.tensor([0.5, 0.1]), 0.2).mean())


def test_every_loss_is_that_of_its_name():
    torch.manual_seed(1)
    target, samples = torch.randn(5, 3), torch.randn(4, 5, 3)
    error = samples - target
    expected = {
        "mae": error.abs().mean(),
        "mse": error.square().mean(),
        "huber": huber(error, 0.3).mean(),
        "conditional_huber": conditional_huber(samples, target, 0.3),
        "nll": sample_nll(samples, target),
        "crps": sample_crps(samples, target),
    }
    for name, value in expected.items():
        settings = config(loss=name, huber_delta=0.3, loss_unit="eV", weights={"forces": 1.0})
        found = data_loss({"forces": samples}, {"forces": target}, torch.tensor([5]), settings)
        torch.testing.assert_close(found["forces"], value.double())
