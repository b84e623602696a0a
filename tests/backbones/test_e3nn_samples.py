"""Statistics, symmetry and gradients of sampled `o3.Linear` layers."""

import copy

import pytest
import torch

from blips.backbones import e3nn_maps
from blips.bayes import noise
from blips.bayes.linear import kind_of, make_plain, make_stochastic
from blips.bayes.noise import FrozenDraw, Noise
from blips.errors import InputError

pytest.importorskip("e3nn.util", reason="e3nn is not installed", exc_type=ImportError)
e3nn_maps.register()

from e3nn import o3  # noqa: E402

pytestmark = pytest.mark.usefixtures("float64")
SOURCES = "4x0e + 3x1o + 2x0o + 1x0e"
TARGETS = "3x0e + 5x1e + 2x1o + 2x0o"  # nothing maps to the axial vectors; two paths to the scalars
ROWS = 6


@pytest.fixture
def layer(float64) -> o3.Linear:
    torch.manual_seed(0)
    layer = o3.Linear(SOURCES, TARGETS, biases=True)
    layer.bias.data.normal_()
    return make_stochastic(layer, "map")


@pytest.fixture
def h() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    size = o3.Irreps(SOURCES).dim
    return torch.randn(ROWS, size, generator=generator, dtype=torch.float64)


@pytest.fixture
def coef() -> torch.Tensor:
    return torch.linspace(0.1, 0.6, ROWS, dtype=torch.float64)


def test_the_mean_is_the_layers_own_forward_bitwise_and_conversion_can_be_undone(layer, h):
    plain = make_plain(copy.deepcopy(layer))
    assert type(plain) is o3.Linear
    assert torch.equal(layer(h), plain(h))
    assert layer.weight.ndim == 1
    plain.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("estimator", ["flipout", "auto"])
def test_without_spread_a_sample_is_the_mean(layer, h, estimator):
    tiny = torch.full((ROWS,), 1e-26, dtype=torch.float64)
    with noise.use(Noise({"map": tiny}, noise.generators(0, 2), estimator)):
        sample = layer(h.repeat(2, 1))
    torch.testing.assert_close(sample, layer(h).repeat(2, 1))


@pytest.mark.statistical
def test_samples_have_the_mean_and_the_covariance_of_random_weights(layer, h, coef):
    """Cov(z_vc, z_vd) = coef sum_u W_vu^2 h_uc h_ud: components covary, channels do not."""
    count = 4000
    with noise.use(Noise({"map": coef}, noise.generators(0, count), "flipout")):
        samples = layer(h.repeat(count, 1)).view(count, ROWS, -1).detach()
    deviations = samples - layer(h).detach()
    expected = torch.zeros(ROWS, *2 * [samples.shape[-1]], dtype=torch.float64)
    columns = torch.arange(layer.irreps_out.dim)
    for path, weight in e3nn_maps.paths_and_weights(layer):
        x = h[:, layer.irreps_in.slices()[path.i_in]]
        dim = layer.irreps_in[path.i_in].ir.dim
        x = x.view(ROWS, -1, dim)
        var = torch.einsum("vu,zuc,zud->zvcd", weight.square(), x, x).detach()
        for v, own in enumerate(columns[layer.irreps_out.slices()[path.i_out]].view(-1, dim)):
            expected[:, own[:, None], own] += coef[:, None, None] * var[:, v]
    spread = torch.diagonal(expected, dim1=1, dim2=2).sqrt()  # [rows, columns]
    assert bool((deviations.mean(0).abs() <= 5 * spread / count**0.5).all())
    covariance = torch.einsum("kza,kzb->zab", deviations, deviations) / count
    error = (covariance - expected).abs() / (spread[:, :, None] * spread[:, None] + 1e-12)
    assert float(error.max()) < 8 / count**0.5
    between_rows = torch.einsum("kxa,kya->xya", deviations, deviations) / count
    scale = spread[:, None] * spread[None] + 1e-12
    correlation = (between_rows / scale)[~torch.eye(ROWS, dtype=torch.bool)]
    assert float(correlation.abs().max()) < 8 / count**0.5


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("estimator", ["flipout", "auto", "frozen"])
def test_every_sample_is_exactly_equivariant(layer, h, coef, estimator, mirrored):
    turn = o3.rand_matrix() * (-1 if mirrored else 1)
    turn_in, turn_out = (i.D_from_matrix(turn) for i in (layer.irreps_in, layer.irreps_out))

    def sample(x: torch.Tensor) -> torch.Tensor:
        drawn = (
            Noise({"map": coef}, [FrozenDraw(0, k) for k in range(3)])
            if estimator == "frozen"
            else Noise({"map": coef}, noise.generators(0, 3), estimator)
        )
        with noise.use(drawn):
            return layer(x.repeat(3, 1))

    expected = sample(h) @ turn_out.T
    torch.testing.assert_close(sample(h @ turn_in.T), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("irreps", ["2x1o", "2x0o"])
def test_local_noise_is_for_scalars_alone(h, coef, irreps):
    """Not for pseudoscalars either: noise that does not change sign breaks reflections."""
    local = Noise({"map": coef}, noise.generators(0, 1), "local")
    mixing = make_stochastic(o3.Linear(f"1x0e + {irreps}", f"3x0e + {irreps}"), "map")
    x = h[:, : mixing.irreps_in.dim]
    with noise.use(local), pytest.raises(InputError, match=r"'map\[1\]'.*irrep axis"):
        mixing(x)
    scalars = make_stochastic(o3.Linear("4x0e", "3x0e"), "map")
    with noise.use(local):
        assert not torch.allclose(scalars(h[:, :4]), make_plain(copy.deepcopy(scalars))(h[:, :4]))


@pytest.mark.parametrize("estimator", ["flipout", "frozen"])
def test_gradients_reach_the_flat_weight_and_the_input(layer, h, coef, estimator):
    def sample(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, c: torch.Tensor):
        drawn = (
            Noise({"map": c}, [FrozenDraw(0, k) for k in range(2)])
            if estimator == "frozen"
            else Noise({"map": c}, noise.generators(0, 2), estimator)
        )
        with noise.use(drawn):
            return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, x)

    weight, bias = layer.weight.detach(), layer.bias.detach()
    inputs = (weight, bias, h.repeat(2, 1), coef)
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(sample, leaves, fast_mode=True)


def test_replicas_do_not_depend_on_how_they_are_grouped(layer, h, coef):
    with noise.use(Noise({"map": coef}, noise.generators(3, 4), "flipout")):
        together = layer(h.repeat(4, 1)).view(4, ROWS, -1)
    for k in range(4):
        with noise.use(Noise({"map": coef}, noise.generators(3, 1, first=k), "flipout")):
            torch.testing.assert_close(layer(h), together[k])
    assert not torch.allclose(together[0], together[1])


def test_copies_need_no_registration(layer, h, coef, monkeypatch):
    monkeypatch.setattr("blips.bayes.linear._kinds", [])
    twin = copy.deepcopy(layer)
    assert kind_of(make_plain(copy.deepcopy(layer))) is None
    drawn = [Noise({"map": coef}, noise.generators(0, 1), "flipout") for _ in range(2)]
    with noise.use(drawn[0]):
        expected = layer(h)
    with noise.use(drawn[1]):
        assert torch.equal(twin(h), expected)


def test_shapes_without_rows_or_with_more_axes_are_refused(layer, h, coef):
    with (
        noise.use(Noise({"map": coef}, noise.generators(0, 1), "flipout")),
        pytest.raises(InputError, match="channels and components"),
    ):
        layer(h[None])
    empty = Noise({"map": coef[:0]}, noise.generators(0, 2), "flipout")
    with noise.use(empty):
        assert layer(h[:0]).shape == (0, layer.irreps_out.dim)
