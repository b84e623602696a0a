import copy
import pickle

import pytest
import torch
from torch import nn

from blips.bayes import noise
from blips.bayes.linear import MapKind, kind_of, make_plain, make_stochastic, register_kind
from blips.bayes.noise import FrozenDraw, Noise
from blips.errors import ConversionError, InputError


def stochastic(size_in: int = 4, size_out: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return make_stochastic(nn.Linear(size_in, size_out), "map")


def sampled(rows: int, replicas: int = 1, coef: float = 0.3, estimator: str = "auto"):
    return Noise({"map": torch.full((rows,), coef)}, noise.generators(0, replicas), estimator)


def test_conversion_keeps_parameters_and_the_mean_is_the_plain_layer_bitwise():
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    state = {k: v.clone() for k, v in plain.state_dict().items()}
    h = torch.randn(5, 4)
    before = plain(h)
    layer = make_stochastic(plain, "map")
    assert layer is plain
    assert isinstance(layer, nn.Linear)
    assert layer.state_dict().keys() == state.keys()
    assert torch.equal(layer(h), before)
    with noise.use(sampled(5)):
        assert not torch.equal(layer(h), before)
    back = make_plain(layer)
    assert type(back) is nn.Linear
    assert vars(back).keys() == vars(nn.Linear(4, 3)).keys()
    assert torch.equal(back(h), before)
    nn.Linear(4, 3).load_state_dict(layer.state_dict())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_stochastic_too(duplicate):
    layer = stochastic()
    twin = duplicate(layer)
    h = torch.randn(5, 4)
    assert torch.equal(twin(h), layer(h))
    with noise.use(sampled(5)):
        drawn = layer(h)
    with noise.use(sampled(5)):
        assert torch.equal(twin(h), drawn)


def test_the_same_generators_give_the_same_sample_however_replicas_are_grouped():
    layer, h = stochastic(), torch.randn(5, 4)
    coef = {"map": torch.full((5,), 0.3)}
    for estimator in ("local", "flipout"):
        of_all = {"map": coef["map"].repeat(4)}
        with noise.use(Noise(of_all, noise.generators(3, 4), estimator)):
            together = layer(h.repeat(4, 1)).reshape(4, 5, 3)
        for k in range(4):
            with noise.use(Noise(coef, noise.generators(3, 1, first=k), estimator)):
                torch.testing.assert_close(layer(h), together[k])


def test_local_refuses_an_irrep_axis_and_names_the_remedy():
    layer = stochastic()
    with noise.use(sampled(5, estimator="local")), pytest.raises(InputError) as error:
        layer(torch.randn(5, 3, 4))
    assert "irrep axis" in str(error.value)
    assert 'estimator="flipout"' in str(error.value)
    with noise.use(sampled(5, estimator="auto")):
        assert layer(torch.randn(5, 3, 4)).shape == (5, 3, 3)


def test_a_vector_without_rows_is_refused():
    with noise.use(sampled(4)), pytest.raises(InputError, match="a Bayesian map needs"):
        stochastic()(torch.randn(4))


def test_frozen_noise_is_the_linear_map_with_perturbed_weights():
    layer = stochastic().double()
    draw = FrozenDraw(seed=5)
    h, coef = torch.randn(6, 4).double(), torch.rand(6).double()
    with noise.use(Noise({"map": coef}, [draw])):
        z = layer(h)
    eps = draw.normal_like("map", layer.weight)
    for row in range(6):
        weight = layer.weight * (1 + coef[row].sqrt() * eps)
        torch.testing.assert_close(z[row], weight @ h[row] + layer.bias)


class ScaledDense(nn.Module):
    """A foreign layer: weight [in, out], scaled, with its activation inside."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 3))
        self.offset = nn.Parameter(torch.randn(3))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(h @ self.matrix / 2.0 + self.offset)


def test_a_registered_foreign_layer_is_sampled_in_its_own_form(monkeypatch):
    torch.manual_seed(0)
    layer = ScaledDense()
    with pytest.raises(ConversionError, match="register it with"):
        make_stochastic(layer, "map")
    monkeypatch.setattr("blips.bayes.linear._kinds", [])
    register_kind(
        MapKind(
            ScaledDense,
            canonical=lambda m: (m.matrix.T / 2.0, m.offset),
            finish=lambda _, z: torch.tanh(z),
        )
    )
    h = torch.randn(5, 4)
    before = layer(h)
    make_stochastic(layer, "map")
    assert torch.equal(layer(h), before)
    with noise.use(sampled(5, coef=1e-12)):
        torch.testing.assert_close(layer(h), before)
    with noise.use(sampled(5, coef=1.0)):
        z = layer(h)
    assert z.abs().max() <= 1.0
    assert not torch.allclose(z, before, atol=1e-2)


def test_products_take_the_gradient_back_through_what_follows_the_product():
    torch.manual_seed(0)
    layer = ScaledDense()
    kind = MapKind(
        ScaledDense,
        canonical=lambda m: (m.matrix.T / 2.0, m.offset),
        finish=lambda _, z: torch.tanh(z),
    )
    h, gradient = torch.randn(5, 4), torch.randn(5, 3, requires_grad=True)
    (product,) = kind.products(layer, "map", h, gradient)
    slope = 1 - torch.tanh(h @ layer.matrix / 2.0 + layer.offset) ** 2
    torch.testing.assert_close(product.gradient, gradient * slope)
    (back,) = torch.autograd.grad(product.gradient.sum(), gradient)  # second derivatives
    torch.testing.assert_close(back, slope)
    assert kind.shapes(layer, "map") == {"map": (3, 4)}
    (plain,) = MapKind(nn.Linear).products(nn.Linear(4, 3), "map", h, gradient)
    assert plain.gradient is gradient


def test_later_kinds_count_first(monkeypatch):
    monkeypatch.setattr("blips.bayes.linear._kinds", [MapKind(nn.Linear)])
    later = MapKind(nn.Linear, finish=lambda _, z: torch.tanh(z))
    register_kind(later)
    assert kind_of(nn.Linear(2, 2)) is later


def test_a_subclass_with_its_own_forward_is_not_taken_for_a_linear_map():
    class Activated(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.relu(super().forward(input))

    assert kind_of(Activated(2, 2)) is None
    assert kind_of(nn.Linear(2, 2)) is not None


@pytest.mark.statistical
def test_flipout_has_the_spread_of_derivatives_that_random_weights_have_and_local_has_less():
    """For w ~ N(W, c W^2) and h(t), dz/dt varies by c sum (W h')^2; noise on outputs loses it."""
    layer = make_stochastic(nn.Linear(4, 1, bias=False).double(), "map")
    weight = torch.tensor([[1.0, -2.0, 0.5, 3.0]]).double()
    layer.weight = nn.Parameter(weight)
    h, direction = torch.tensor([[1.0, 1, 1, 1], [1.0, -1, 2, 0.5]]).double()
    rows, coef = 40000, 0.3
    t = torch.zeros(rows, 1, dtype=torch.float64, requires_grad=True)
    slope_var = {}
    for estimator in ("local", "flipout"):
        slopes = []
        for seed in range(20):  # flipout's rows share a weight noise up to signs
            noisy = Noise(
                {"map": torch.full((rows // 20,), coef).double()},
                noise.generators(seed, 1),
                estimator,
            )
            part = t[: rows // 20]
            with noise.use(noisy):
                z = layer(h + part * direction)
            slopes.append(torch.autograd.grad(z.sum(), t)[0][: rows // 20])
        slope_var[estimator] = float(torch.cat(slopes).var())
    value_var = coef * float((weight * h).square().sum())
    exact = coef * float((weight * direction).square().sum())
    along = (coef * float((weight.square() * h * direction).sum())) ** 2 / value_var
    assert slope_var["flipout"] == pytest.approx(exact, rel=0.35)
    assert slope_var["local"] == pytest.approx(along, rel=0.05)
    assert slope_var["local"] < 0.7 * slope_var["flipout"]
