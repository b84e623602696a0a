"""Mean and variance in one forward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blips.bayes import noise as noise_context
from blips.bayes.convert import convert
from blips.bayes.noise import SampledNoise, generators
from blips.bayes.propagate import Propagation, Uncertain, UnsupportedOperation, parts

GENERATOR = torch.manual_seed(0)


def uncertain(*shape: int, scale: float = 1e-3) -> Uncertain:
    mean = torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)
    var = scale**2 * torch.rand(*shape, dtype=torch.float64, generator=GENERATOR)
    return Uncertain.make(mean, var)


def sampled_var(function, x: Uncertain, count: int = 40_000) -> Tensor:
    mean, var = parts(x)
    noise = torch.randn(count, *mean.shape, dtype=mean.dtype, generator=GENERATOR)
    return torch.stack([function(one) for one in mean + noise * var.sqrt()]).var(dim=0)


WEIGHT = torch.randn(4, 5, dtype=torch.float64, generator=GENERATOR)
INDEX = torch.tensor([0, 2, 2])
OPERATIONS = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "linear": lambda x: F.linear(x, WEIGHT),
    "scatter": lambda x: torch.zeros(3, 5, dtype=x.dtype).index_add(0, INDEX, x),
    "gather": lambda x: x[INDEX] - 1.0,
    "cat": lambda x: torch.cat([x, 2.0 * x], dim=1),
    "rms_norm": lambda x: F.rms_norm(x, (5,), WEIGHT[0], 1e-5),
    "layer_norm": lambda x: F.layer_norm(x, (5,), WEIGHT[0], WEIGHT[1]),
    "sum": lambda x: (-x / 3.0).sum(dim=0),
    "mean": lambda x: x.mean(dim=1),
    "cross": lambda x: torch.linalg.cross(WEIGHT[:3, :3], x[:, :3]),
}


@pytest.mark.statistical
@pytest.mark.parametrize("name", OPERATIONS)
def test_rules_are_first_order_variances(name):
    function, x = OPERATIONS[name], uncertain(3, 5)
    mean, var = parts(function(x))
    torch.testing.assert_close(mean, function(parts(x)[0]))
    count = 4000
    assert var.numpy() == pytest.approx(sampled_var(function, x, count).numpy(), rel=0.15, abs=1e-9)


def test_products_of_independent_values_have_their_own_variance():
    x, y = uncertain(4, 3, scale=0.5), uncertain(4, 3, scale=0.5)
    (a, var_a), (b, var_b) = parts(x), parts(y)
    _, var = parts(x * y)
    torch.testing.assert_close(var, a**2 * var_b + b**2 * var_a + var_a * var_b)


@pytest.mark.statistical
def test_one_bayesian_map_is_exact_and_two_are_close():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 3)).double()
    convert(net, {"*": "node"})
    h = torch.randn(7, 6, dtype=torch.float64)
    coefficients = {name: torch.full((7,), 0.02, dtype=torch.float64) for name in ("0", "2")}
    with torch.no_grad(), noise_context.use(Propagation(coefficients)):
        first = parts(net[0](h))[1]
        mean, var = parts(net(h))
    torch.testing.assert_close(first, 0.02 * F.linear(h.square(), net[0].weight.detach().square()))
    torch.testing.assert_close(mean, net(h).detach())
    samples = 4000
    noise = SampledNoise(coefficients, generators(0, samples), "local")
    with torch.no_grad(), noise_context.use(noise):
        drawn = net(h.repeat(samples, 1)).view(samples, 7, 3)
    assert var.sqrt().numpy() == pytest.approx(drawn.std(dim=0).numpy(), rel=0.1)


def test_results_in_place_are_those_out_of_place():
    for change in (lambda x: x.div_(WEIGHT[:3]), lambda x: x.mul_(2.0), lambda x: x.add_(1.0)):
        x = uncertain(3, 5)
        y = Uncertain.make(parts(x)[0].clone(), x.variance.clone())
        change(x)  # the result is not used
        expected = {0: y / WEIGHT[:3], 1: y * 2.0, 2: y + 1.0}
        assert any(
            torch.allclose(parts(x)[0], parts(e)[0]) and torch.allclose(x.variance, e.variance)
            for e in expected.values()
        )


def test_an_unknown_operation_is_named():
    with pytest.raises(UnsupportedOperation, match="'cumsum'"):
        uncertain(3, 2).cumsum(0)
    with pytest.raises(UnsupportedOperation, match="plain tensor"):
        torch.zeros(3)[0] = uncertain(1)[0]
