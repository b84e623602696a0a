import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from blips.bayes import estimators, pieces
from blips.bayes.estimators import flipout_linear, frozen_linear, local_linear
from blips.bayes.kernels import sign_mask
from blips.bayes.random import BitSource, normals, quick_normals, sign_bits
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


@pytest.fixture(params=[10**6, 2 * IN, 1], ids=["whole", "grouped", "row by row"])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply the maps to all rows at once, to groups of replicas, or to single rows."""
    monkeypatch.setattr(pieces, "PIECE", request.param)


# ---------------------------------------------------------------------------------- values


def test_local_is_its_equation():
    h, weight, bias, coef = problem(6, grad=False)
    z = local_linear(h, weight, bias, coef, seeded(2))
    eps = quick_normals(BitSource(seeded(2)), 3, OUT, h.dtype)
    std = (coef.unsqueeze(-1) * h**2 @ (weight**2).T).sqrt()
    torch.testing.assert_close(z, F.linear(h, weight, bias) + eps * std, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("piece")
@pytest.mark.parametrize("irrep", [(), (3,), (2, 3)])
def test_flipout_is_its_equation(irrep: tuple[int, ...]):
    h, weight, bias, coef = problem(6, *irrep, grad=False)
    z = flipout_linear(h, weight, bias, coef, seeded(2))
    generators = seeded(2)
    eps = normals(weight.shape, generators, h.dtype)
    inner = (1,) * len(irrep)
    source = BitSource(generators)
    bits_out, bits_in = sign_bits(source, 3, OUT, IN)
    s = torch.where(sign_mask(bits_in, IN) == 0, 1.0, -1.0).view(6, *inner, IN)
    r = torch.where(sign_mask(bits_out, OUT) == 0, 1.0, -1.0).view(6, *inner, OUT)
    per_row = (weight * eps).repeat_interleave(3, 0)  # [6, out, in]
    product = torch.einsum("n...u,nvu->n...v", h * s, per_row)
    scale = coef.sqrt().view(6, *inner, 1)
    torch.testing.assert_close(z, F.linear(h, weight, bias) + scale * r * product)


@pytest.mark.usefixtures("piece")
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
@pytest.mark.usefixtures("piece")
def test_vanishing_coefficients_give_the_mean(estimator: Estimator):
    h, weight, bias, coef = problem(6, grad=False)
    z = estimator(h, weight, bias, torch.zeros_like(coef), seeded(2))
    torch.testing.assert_close(z, F.linear(h, weight, bias), rtol=0, atol=1e-15)


@ALL
@pytest.mark.usefixtures("piece")
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
@pytest.mark.usefixtures("piece")
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


# ----------------------------------------------------------------------------- derivatives


@ALL
@pytest.mark.usefixtures("piece")
@pytest.mark.parametrize("bias", [True, False])
def test_first_and_second_derivatives(estimator: Estimator, bias: bool):
    inputs = problem(4, bias=bias)
    assert gradcheck(lambda *x: estimator(*x, seeded(2)), inputs)
    assert gradgradcheck(lambda *x: estimator(*x, seeded(2)), inputs)


@WITH_IRREPS
@pytest.mark.usefixtures("piece")
def test_first_and_second_derivatives_with_an_irrep_axis(estimator: Estimator):
    inputs = problem(4, 3)
    assert gradcheck(lambda *x: estimator(*x, seeded(2)), inputs)
    assert gradgradcheck(lambda *x: estimator(*x, seeded(2)), inputs)


@pytest.mark.parametrize(("replicas", "irrep"), [(1, ()), (1, (3,)), (3, ()), (3, (3,))])
def test_single_precision_flips_the_same_signs(replicas: int, irrep: tuple[int, ...]):
    def values_and_gradients(dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.detach().to(dtype) for x in problem(12, *irrep) if x is not None]
        h, weight, bias, coef = (x.requires_grad_() for x in inputs)
        eps = normals(weight.shape, seeded(replicas, first=7), torch.float64).to(dtype)
        generators = seeded(replicas)
        z = flipout_linear(h, weight, bias, coef, generators, weight.detach() * eps)
        force = torch.autograd.grad(z.square().sum(), h, create_graph=True)[0]
        return [z, force, *torch.autograd.grad(force.square().sum(), (h, weight, coef))]

    single, double = values_and_gradients(torch.float32), values_and_gradients(torch.float64)
    for value, expected in zip(single, double, strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-4)


@ALL
def test_third_derivative(estimator: Estimator):
    h, weight, _, coef = problem(2)

    def slope(x: Tensor) -> Tensor:
        z = estimator(x, weight.detach(), None, coef.detach(), seeded(1))
        return torch.autograd.grad(z.sin().sum(), x, create_graph=True)[0]

    assert gradgradcheck(slope, (h,))


@ALL
def test_derivatives_are_finite_at_zero_input(estimator: Estimator):
    h, weight, bias, coef = problem(4)
    zero = torch.zeros_like(h, requires_grad=True)
    z = estimator(zero, weight, bias, coef, seeded(2))
    first = torch.autograd.grad(z.square().sum(), (zero, weight, coef), create_graph=True)
    penalty = sum((grad.square().sum() for grad in first), start=torch.zeros(()))
    second = torch.autograd.grad(penalty, (zero, weight, coef))
    assert all(grad.isfinite().all() for grad in (*first, *second))


@pytest.mark.parametrize("estimator", [local_linear])
def test_an_exactly_vanishing_normal_has_finite_second_derivatives(
    estimator: Estimator, monkeypatch: pytest.MonkeyPatch
):
    def no_noise(source, rows, channels, dtype) -> Tensor:
        return torch.zeros((len(source.generators) * rows, channels), dtype=dtype)

    monkeypatch.setattr(estimators, "quick_normals", no_noise)
    h, weight, bias, coef = problem(4)
    z = estimator(h, weight, bias, coef, seeded(2))
    (force,) = torch.autograd.grad(z.square().sum(), h, create_graph=True)
    (second,) = torch.autograd.grad(force.square().sum(), h)
    assert second.isfinite().all()


# ---------------------------------------------------------------------------- cost in kind


class CountProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.count += func.overloadpacket in (aten.mm, aten.bmm, aten.addmm, aten.addmm_)
        return func(*args, **(kwargs or {}))


@ALL
def test_forces_do_not_pay_for_weight_gradients(estimator: Estimator):
    inputs = problem(4)
    z = estimator(*inputs, seeded(1))
    with CountProducts() as products:
        torch.autograd.grad(z.sum(), inputs[0])
    assert products.count == 2


@ALL
def test_at_most_two_extra_activations_are_kept(estimator: Estimator):
    rows, width = 3000, 128
    h = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(width, width, requires_grad=True)
    coef = torch.rand(rows, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        z = estimator(h, weight, None, coef, seeded(1))
    activation = h.untyped_storage().nbytes()
    assert z.shape == (rows, width)
    assert sum(kept.values()) - activation < 2.1 * activation  # h itself is kept by any map


def test_large_maps_are_cut_into_pieces_of_bounded_size():
    rows = 5 * pieces.PIECE // 64
    largest = math.ceil(pieces.PIECE / 64)
    h, weight = torch.randn(rows, 64), torch.randn(64, 64)
    plan = pieces.Plan(h, weight, 1)
    sizes = [len(part) for part in plan.rows(h)]
    assert max(sizes) <= largest
    assert sum(sizes) == rows
