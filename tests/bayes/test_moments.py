"""First-order variances against closed forms."""

import pytest
import torch

from blips.bayes.estimators import flipout_linear, frozen_linear
from blips.bayes.moments import Record, row_variances, shared_variances
from blips.bayes.noise import generators

ROWS, IN, OUT = 5, 4, 3


def record(irrep: tuple[int, ...] = ()) -> tuple[Record, torch.Tensor]:
    torch.manual_seed(1)
    h = torch.randn(ROWS, *irrep, IN, dtype=torch.float64)
    weight = torch.randn(OUT, IN, dtype=torch.float64)
    coef = torch.rand(ROWS, dtype=torch.float64)
    gradient = torch.randn(ROWS, *irrep, OUT, dtype=torch.float64)
    return Record("map", "map", h, weight, coef, h @ weight.T), gradient


@pytest.mark.parametrize("irrep", [(), (3,), (5,)])
def test_rows_with_noise_of_their_own(irrep):
    """Against the sum of squares of dE / d(eps_uv) of each row, which autograd gives."""
    given, gradient = record(irrep)
    eps = torch.zeros(ROWS, OUT, IN, dtype=torch.float64, requires_grad=True)
    weights = given.weight * (1 + given.coef.sqrt()[:, None, None] * eps)  # one for each row
    z = torch.einsum("r...i,roi->r...o", given.h, weights)
    (by_eps,) = torch.autograd.grad((z * gradient).sum(), eps)
    expected = by_eps.square().sum(dim=(1, 2))
    assert torch.allclose(row_variances(given, gradient), expected, rtol=1e-12)


@pytest.mark.parametrize("irrep", [(), (3,)])
def test_one_draw_for_all_rows(irrep):
    given, gradient = record(irrep)
    structure = torch.tensor([0, 0, 1, 1, 1])
    eps = torch.zeros(1, OUT, IN, dtype=torch.float64, requires_grad=True)
    z = frozen_linear(given.h, given.weight, None, given.coef, eps)
    expected = []
    for s in (0, 1):
        (by_eps,) = torch.autograd.grad(
            (z * gradient)[structure == s].sum(), eps, retain_graph=True
        )
        expected.append(by_eps.square().sum())
    found = shared_variances([(given, gradient, structure)], 2)
    assert torch.allclose(found, torch.stack(expected), rtol=1e-12)


def test_applications_of_one_matrix_share_their_draw():
    given, gradient = record()
    structure = torch.zeros(ROWS, dtype=torch.long)
    once = shared_variances([(given, gradient, structure)], 1)
    twice = shared_variances([(given, gradient, structure)] * 2, 1)
    assert torch.allclose(twice, 4 * once)


@pytest.mark.statistical
@pytest.mark.parametrize("irrep", [(), (3,)])
def test_a_linear_function_of_flipout_samples_has_this_variance(irrep):
    given, gradient = record(irrep)
    count = 20_000
    z = flipout_linear(
        given.h.repeat(count, *(1,) * (given.h.ndim - 1)),
        given.weight,
        None,
        given.coef.repeat(count),
        generators(0, count),
    )
    energies = (z.reshape(count, -1) * gradient.reshape(1, -1)).sum(dim=1)
    expected = float(row_variances(given, gradient).sum())
    assert float(energies.var()) == pytest.approx(expected, rel=0.05)
