import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from blips.bayes import estimators
from blips.bayes.estimators import flipout_linear, frozen_linear, local_linear, normals, signs
from blips.errors import InputError

IN, OUT = 5, 3
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor]
Estimator = Callable[..., Tensor]


def seeded(count: int, first: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(first + k) for k in range(count)]


def frozen(h: Tensor, weight: Tensor, bias: Tensor | None, coef: Tensor, generators) -> Tensor:
    """The frozen estimator behind the signature of the others."""
    eps = normals(weight.shape, generators, weight.dtype)
    return frozen_linear(h, weight, bias, coef, eps)


ALL = pytest.mark.parametrize("estimator", [local_linear, flipout_linear, frozen])
WITH_IRREPS = pytest.mark.parametrize("estimator", [flipout_linear, frozen])


def problem(rows: int, *irrep: int, bias: bool = True, grad: bool = True) -> Inputs:
    torch.manual_seed(1)
    options = {"dtype": torch.float64, "requires_grad": grad}
    return (
        torch.randn(rows, *irrep, IN, **options),
        torch.randn(OUT, IN, **options),
        torch.randn(OUT, **options) if bias else None,
        torch.rand(rows, **options),
    )


# ---------------------------------------------------------------------------------- values


def test_local_is_its_equation():
    h, weight, bias, coef = problem(6, grad=False)
    z = local_linear(h, weight, bias, coef, seeded(2))
    eps = normals((3, OUT), seeded(2), h.dtype).view(6, OUT)
    std = (coef.unsqueeze(-1) * h**2 @ (weight**2).T).sqrt()
    torch.testing.assert_close(z, F.linear(h, weight, bias) + eps * std, rtol=0, atol=1e-5)


@pytest.mark.parametrize("irrep", [(), (3,), (2, 3)])
def test_flipout_is_its_equation(irrep: tuple[int, ...]):
    h, weight, bias, coef = problem(6, *irrep, grad=False)
    z = flipout_linear(h, weight, bias, coef, seeded(2))
    generators, inner = seeded(2), (1,) * len(irrep)
    eps = normals(weight.shape, generators, h.dtype)
    s = signs((3, IN), generators, h.dtype).view(6, *inner, IN)
    per_row = (weight * eps).repeat_interleave(3, 0)  # [6, out, in]
    product = torch.einsum("n...u,nvu->n...v", h * s, per_row)
    scale = coef.sqrt().view(6, *inner, 1)
    torch.testing.assert_close(z, F.linear(h, weight, bias) + scale * product)


@pytest.mark.parametrize("irrep", [(), (3,)])
def test_frozen_is_its_equation(irrep: tuple[int, ...]):
    h, weight, bias, coef = problem(6, *irrep, grad=False)
    eps = torch.randn(2, OUT, IN, dtype=h.dtype)
    z = frozen_linear(h, weight, bias, coef, eps)
    scale = coef.sqrt().view(6, *(1,) * len(irrep), 1, 1)
    per_row = (
        1 + scale * eps.repeat_interleave(3, 0).view(6, *(1,) * len(irrep), OUT, IN)
    ) * weight
    expected = (per_row @ h.unsqueeze(-1)).squeeze(-1) + bias
    torch.testing.assert_close(z, expected)


@ALL
def test_vanishing_coefficients_give_the_mean(estimator: Estimator):
    h, weight, bias, coef = problem(6, grad=False)
    z = estimator(h, weight, bias, torch.zeros_like(coef), seeded(2))
    torch.testing.assert_close(z, F.linear(h, weight, bias), rtol=0, atol=1e-15)


@ALL
def test_noise_grows_with_the_root_of_the_coefficient_in_outputs_and_in_both_derivatives(estimator):
    h, weight, _, coef = problem(6)

    def noise(coef: Tensor) -> list[Tensor]:
        """Of z, of the gradient of <z, z> / 2 by h, and of that gradient's own gradient."""
        z = estimator(h, weight, None, coef, seeded(2)) - F.linear(h, weight)
        (force,) = torch.autograd.grad(z.sum(), h, create_graph=True)
        (second,) = torch.autograd.grad((force * h).sum(), weight)
        return [z, force, second]

    for twice, once in zip(noise(4 * coef), noise(coef), strict=True):
        torch.testing.assert_close(twice, 2 * once)


@ALL
def test_a_replica_does_not_depend_on_the_others(estimator: Estimator):
    h, weight, bias, coef = problem(12, grad=False)
    together = estimator(h, weight, bias, coef, seeded(4))
    for k, (rows, coefs) in enumerate(zip(h.split(3), coef.split(3), strict=True)):
        alone = estimator(rows, weight, bias, coefs, seeded(1, first=k))
        torch.testing.assert_close(together[3 * k : 3 * k + 3], alone)


@ALL
def test_replicas_differ(estimator: Estimator):
    h, weight, bias, coef = problem(3, grad=False)
    z = estimator(h.repeat(2, 1), weight, bias, coef.repeat(2), seeded(2))
    assert (z[:3] - z[3:]).abs().min() > 1e-6


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_type_of_the_input_is_kept(estimator: Estimator, dtype: torch.dtype):
    h, weight, bias, coef = (x.to(dtype) for x in problem(6, grad=False) if x is not None)
    assert estimator(h, weight, bias, coef, seeded(2)).dtype == dtype


@ALL
def test_no_rows(estimator: Estimator):
    h, weight, bias, coef = problem(0)
    z = estimator(h, weight, bias, coef, seeded(2))
    z.sum().backward()
    assert z.shape == (0, OUT)
    assert h.grad is not None


@WITH_IRREPS
def test_samples_are_equivariant(estimator: Estimator):
    h, weight, _, coef = problem(6, 3, grad=False)
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=h.dtype)).Q
    rotated_first = estimator(rotation @ h, weight, None, coef, seeded(2))
    rotated_last = rotation @ estimator(h, weight, None, coef, seeded(2))
    torch.testing.assert_close(rotated_first, rotated_last)


@ALL
@pytest.mark.parametrize("replicas", [0, 4])
def test_unequal_replicas_are_refused(estimator: Estimator, replicas: int):
    with pytest.raises(InputError, match="6 rows cannot be split"):
        frozen_linear(*problem(6), torch.ones(replicas, OUT, IN, dtype=torch.float64))
    if replicas:
        with pytest.raises(InputError, match="6 rows cannot be split"):
            estimator(*problem(6), seeded(replicas))


# ----------------------------------------------------------------------------------- seeds


def flipout_noise(size_in: int, size_out: int, replicas: int, rows: int, first: int = 0) -> Tensor:
    """Flipout's noise of maps with unit weights, inputs and coefficients, [K, R, out]."""
    h = torch.ones(replicas * rows, size_in, dtype=torch.float64)
    weight = torch.ones(size_out, size_in, dtype=torch.float64)
    coef = torch.ones(len(h), dtype=torch.float64)
    z = flipout_linear(h, weight, None, coef, seeded(replicas, first))
    return (z - size_in).view(replicas, rows, size_out)


def test_the_same_seed_gives_the_same_noise():
    assert torch.equal(flipout_noise(2, 3, 2, 7), flipout_noise(2, 3, 2, 7))


def test_weight_noise_follows_the_seed():
    """With one weight, noise is s eps: its size is that of eps alone, the same for all rows."""
    first, second = (flipout_noise(1, 1, 1, 7, first=seed).abs() for seed in (0, 1))
    torch.testing.assert_close(first, first[:, :1].expand_as(first))
    assert (first - second).abs().min() > 1e-3


def test_signs_of_inputs_follow_the_seed():
    """With two inputs, |s_1 eps_1 + s_2 eps_2| has two values: which one is s_1 s_2's alone."""
    patterns = []
    for seed in (0, 1):
        size = flipout_noise(2, 1, 1, 64, first=seed).abs().flatten()
        patterns.append(size > (size.min() + size.max()) / 2)
        assert 0.2 < float(patterns[-1].double().mean()) < 0.8
    agree = float((patterns[0] == patterns[1]).double().mean())
    assert 0.2 < agree < 0.8


# ------------------------------------------------------------------------------ statistics


def check_moments(samples: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Compare the moments of ``[count, values]`` with the closed form, within 5 standard errors.

    The error of a covariance is bounded with Gaussian fourth moments, times 2 for heavier tails.
    """
    count = len(samples)
    variance = covariance.diagonal()
    centred = samples - mean
    assert ((samples.mean(0) - mean).abs() < 5 * (variance / count).sqrt()).all()
    error = (centred.T @ centred / count - covariance).abs()
    assert (error < 10 * (torch.outer(variance, variance) / count).sqrt()).all()


@pytest.mark.statistical
def test_local_has_independent_outputs_of_the_right_variance():
    count = 20_000
    h, weight, bias, coef = problem(2, grad=False)
    repeated = h.repeat(count, 1), weight, bias, coef.repeat(count)
    samples = local_linear(*repeated, seeded(1)).view(count, 2 * OUT)
    variance = coef.unsqueeze(-1) * h**2 @ (weight**2).T
    check_moments(samples, F.linear(h, weight, bias).flatten(), variance.flatten().diag())


@pytest.mark.statistical
@WITH_IRREPS
def test_covariance_of_shared_weight_noise(estimator: Estimator):
    """Cov[z_nmv, z_n'm'v] = sqrt(c_n c_n') sum_u h_nmu h_n'm'u W_vu^2; flipout: 0 for n' != n."""
    count, rows, irrep = 5000, 2, 3
    h, weight, bias, coef = problem(rows, irrep, grad=False)
    repeated = h.repeat(count, 1, 1), weight, bias, coef.repeat(count)
    samples = estimator(*repeated, seeded(count)).view(count, -1)
    scaled = coef.sqrt().view(-1, 1, 1) * h
    same_output = torch.eye(OUT, dtype=h.dtype)
    covariance = torch.einsum("nmu,klu,vu,vw->nmvklw", scaled, scaled, weight**2, same_output)
    if estimator is flipout_linear:
        covariance *= torch.eye(rows, dtype=h.dtype).view(rows, 1, 1, rows, 1, 1)
    size = rows * irrep * OUT
    mean = F.linear(h, weight, bias).flatten()
    check_moments(samples, mean, covariance.reshape(size, size))


@pytest.mark.statistical
def test_samples_are_independent_normals():
    """With one weight, K samples are K independent normals: in size, not in sign alone."""
    count = 20_000
    noise = flipout_noise(1, 1, count, 1).flatten()
    cdf = 0.5 * (1 + torch.erf(noise.sort().values / math.sqrt(2)))
    distance = (cdf - (torch.arange(count) + 0.5) / count).abs().max()
    assert distance < 2.0 / math.sqrt(count)  # Kolmogorov-Smirnov, p < 1e-3
    for lag in (1, 2, 4, 8, 16):
        pairs = torch.stack([noise[lag:].square(), noise[:-lag].square()])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 5 / math.sqrt(count)


# ----------------------------------------------------------------------------- derivatives


@ALL
@pytest.mark.parametrize("bias", [True, False])
def test_first_and_second_derivatives(estimator: Estimator, bias: bool):
    inputs = problem(4, bias=bias)
    assert gradcheck(lambda *x: estimator(*x, seeded(2)), inputs)
    assert gradgradcheck(lambda *x: estimator(*x, seeded(2)), inputs)


@WITH_IRREPS
def test_first_and_second_derivatives_with_an_irrep_axis(estimator: Estimator):
    inputs = problem(4, 3)
    assert gradcheck(lambda *x: estimator(*x, seeded(2)), inputs)
    assert gradgradcheck(lambda *x: estimator(*x, seeded(2)), inputs)


@ALL
def test_derivatives_are_finite_at_zero_input(estimator: Estimator):
    h, weight, bias, coef = problem(4)
    zero = torch.zeros_like(h, requires_grad=True)
    z = estimator(zero, weight, bias, coef, seeded(2))
    first = torch.autograd.grad(z.square().sum(), (zero, weight, coef), create_graph=True)
    penalty = sum((grad.square().sum() for grad in first), start=torch.zeros(()))
    second = torch.autograd.grad(penalty, (zero, weight, coef))
    assert all(grad.isfinite().all() for grad in (*first, *second))


def test_an_exactly_vanishing_normal_has_finite_second_derivatives(monkeypatch):
    monkeypatch.setattr(
        estimators,
        "normals",
        lambda shape, generators, dtype: torch.zeros((len(generators), *shape), dtype=dtype),
    )
    h, weight, bias, coef = problem(4)
    z = local_linear(h, weight, bias, coef, seeded(2))
    (force,) = torch.autograd.grad(z.square().sum(), h, create_graph=True)
    (second,) = torch.autograd.grad(force.square().sum(), h)
    assert second.isfinite().all()
