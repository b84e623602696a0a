"""First-order variances against closed forms."""

import pytest
import torch

from blips.bayes.estimators import flipout_linear
from blips.bayes.linear import Product
from blips.bayes.noise import generators
from blips.inference.onepass import row_variances

ROWS, IN, OUT = 5, 4, 3


def product(irrep: tuple[int, ...] = ()) -> tuple[Product, torch.Tensor]:
    """A product with any gradient, and coefficients of its rows."""
    torch.manual_seed(1)
    h = torch.randn(ROWS, *irrep, IN, dtype=torch.float64)
    weight = torch.randn(OUT, IN, dtype=torch.float64)
    coef = torch.rand(ROWS, dtype=torch.float64)
    gradient = torch.randn(ROWS, *irrep, OUT, dtype=torch.float64)
    return Product("map", h, weight, gradient), coef


@pytest.mark.parametrize("irrep", [(), (3,), (5,)])
def test_rows_with_noise_of_their_own(irrep):
    """Against the sum of squares of dE / d(eps_uv) of each row, which autograd gives."""
    given, coef = product(irrep)
    eps = torch.zeros(ROWS, OUT, IN, dtype=torch.float64, requires_grad=True)
    weights = given.weight * (1 + coef.sqrt()[:, None, None] * eps)  # one for each row
    z = torch.einsum("r...i,roi->r...o", given.h, weights)
    (by_eps,) = torch.autograd.grad((z * given.gradient).sum(), eps)
    expected = by_eps.square().sum(dim=(1, 2))
    assert torch.allclose(row_variances(given, coef), expected, rtol=1e-12)


@pytest.mark.statistical
@pytest.mark.parametrize("irrep", [(), (3,)])
def test_a_linear_function_of_flipout_samples_has_this_variance(irrep):
    given, coef = product(irrep)
    count = 20_000
    z = flipout_linear(
        given.h.repeat(count, *(1,) * (given.h.ndim - 1)),
        given.weight,
        None,
        coef.repeat(count),
        generators(0, count),
    )
    energies = (z.reshape(count, -1) * given.gradient.reshape(1, -1)).sum(dim=1)
    expected = float(row_variances(given, coef).sum())
    assert float(energies.var()) == pytest.approx(expected, rel=0.05)
