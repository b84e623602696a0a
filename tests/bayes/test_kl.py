import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal
from torch.distributions import kl_divergence as torch_kl

from blips.bayes.kl import kl_divergence, mean_kl_per_weight, prior_coefficient
from blips.errors import InputError

coefficients = st.floats(1e-5, 10.0)
rates = st.floats(0.01, 0.99)


def normal(mean: float, std: float) -> Normal:
    return Normal(*torch.tensor([mean, std], dtype=torch.float64))


@given(coef=coefficients, rate=rates, theta=st.floats(0.01, 5.0))
def test_equals_torch_distributions_for_any_weight(coef, rate, theta):
    rho = prior_coefficient(rate)
    posterior = normal(theta, math.sqrt(coef) * theta)
    prior = normal(0.0, math.sqrt(rho) * theta)
    ours = mean_kl_per_weight(torch.tensor(coef, dtype=torch.float64), rho)
    torch.testing.assert_close(ours, torch_kl(posterior, prior), rtol=1e-9, atol=1e-9)


@given(rate=rates)
def test_least_at_the_prior_with_value_one_over_two_rho(rate):
    rho = prior_coefficient(rate)
    coef = torch.tensor([0.5 * rho, rho, 2.0 * rho], dtype=torch.float64, requires_grad=True)
    kl = torch.stack([mean_kl_per_weight(one, rho) for one in coef])
    slope = torch.autograd.grad(kl.sum(), coef)[0].tolist()
    below, least, above = kl.tolist()
    assert least == pytest.approx(1.0 / (2.0 * rho))
    assert least < min(below, above)
    assert slope[0] < 0 < slope[2]
    assert abs(slope[1]) < 1e-9 / rho


def test_mean_reduction_weighs_row_types_equally_whatever_their_size():
    coefficients = {"a": torch.full((100,), 0.5), "b": torch.full((50,), 2.0), "c": torch.ones(3)}
    roles = {"a": "edge", "b": "edge", "c": "node"}
    expected = (
        100 * mean_kl_per_weight(torch.tensor(0.5), 1.0)
        + 50 * mean_kl_per_weight(torch.tensor(2.0), 1.0)
    ) / 150 + mean_kl_per_weight(torch.tensor(1.0), 1.0)
    torch.testing.assert_close(kl_divergence(coefficients, roles, 1.0), expected)


def test_elbo_reduction_is_the_sum_over_weights_per_datum():
    coefficients = {"a": torch.tensor([0.5, 1.5]), "b": torch.tensor([2.0])}
    kl = kl_divergence(
        coefficients,
        {"a": "edge", "b": "node"},
        1.0,
        reduction="elbo",
        num_weights={"a": 10, "b": 7},
        num_data=5,
    )
    a = sum(mean_kl_per_weight(torch.tensor(coef), 1.0) for coef in (0.5, 1.5)) / 2
    b = mean_kl_per_weight(torch.tensor(2.0), 1.0)
    torch.testing.assert_close(kl, (10 * a + 7 * b) / 5)


def test_rows_that_do_not_exist_add_nothing():
    roles = {"a": "edge", "b": "node"}
    with_empty = kl_divergence({"a": torch.zeros(0), "b": torch.ones(2)}, roles, 1.0)
    torch.testing.assert_close(with_empty, mean_kl_per_weight(torch.tensor(1.0), 1.0))
    for options in ({}, {"reduction": "elbo", "num_weights": {"a": 2}, "num_data": 3}):
        assert kl_divergence({"a": torch.zeros(0)}, roles, 1.0, **options) == 0.0


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, float("nan")])
def test_impossible_priors_are_refused(rate):
    with pytest.raises(InputError, match="prior_dropout"):
        prior_coefficient(rate)


def test_unknown_reductions_and_missing_counts_are_refused():
    with pytest.raises(InputError, match="unknown KL reduction"):
        kl_divergence({"a": torch.ones(2)}, {"a": "edge"}, 1.0, reduction="sum")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="num_data"):
        kl_divergence({"a": torch.ones(2)}, {"a": "edge"}, 1.0, reduction="elbo")
    for one in ({"num_weights": {"a": 6}}, {"num_data": 3}):
        with pytest.raises(InputError, match="num_data"):
            kl_divergence({"a": torch.ones(2)}, {"a": "edge"}, 1.0, reduction="elbo", **one)


def test_the_prior_s_coefficient_is_the_odds_of_dropping():
    assert prior_coefficient(0.2) == pytest.approx(0.25)
