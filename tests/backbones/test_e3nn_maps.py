"""Layers of e3nn; the same file runs with e3nn 0.4.4 beside MACE (`make test-mace`)."""

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch

from blips.backbones import e3nn_maps
from blips.bayes import noise
from blips.bayes.linear import StochasticMap, kind_of, make_plain, make_stochastic
from blips.bayes.noise import FrozenDraw, Noise
from blips.errors import InputError

pytest.importorskip("e3nn.util", reason="e3nn is not installed", exc_type=ImportError)
e3nn_maps.register()

from e3nn import o3  # noqa: E402
from e3nn.nn import FullyConnectedNet  # noqa: E402

pytestmark = pytest.mark.filterwarnings(  # e3nn 0.4 compiles its code with TorchScript
    "ignore:.torch.jit:DeprecationWarning", "ignore:The TorchScript type system:UserWarning"
)
ROWS = 7
IRREPS = [
    ("6x0e", "4x0e"),
    ("4x0e + 3x1o + 2x2e", "5x0e + 2x1o + 3x2e"),
    ("3x0e + 2x1o + 2x0o + 4x0e + 1x1o", "2x1o + 3x0e + 1x0o + 2x1e"),  # nothing reaches 1e
]


def linear(irreps_in: str, irreps_out: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = o3.Linear(irreps_in, irreps_out, **options)
    if layer.bias.numel():
        layer.bias.data.normal_()
    return layer


def frozen(coef: torch.Tensor, *names: str, members: int = 1) -> Noise:
    draws = [FrozenDraw(0, member) for member in range(members)]
    return Noise({name: coef for name in names}, draws)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("irreps_in", "irreps_out"), IRREPS)
def test_a_frozen_draw_of_a_linear_is_e3nns_own_with_other_weights(
    float64, irreps_in, irreps_out, biases
):
    layer = linear(irreps_in, irreps_out, biases=biases)
    h, coef = torch.randn(ROWS, layer.irreps_in.dim), torch.rand(ROWS)
    plain, before = copy.deepcopy(layer), layer(h)
    make_stochastic(layer, "map")
    assert torch.equal(layer(h), before)
    assert layer.weight.shape == plain.weight.shape
    with noise.use(frozen(coef, "map")):
        sample = layer(h)
    weights = [weight for _, weight in e3nn_maps.paths_and_weights(layer)]
    draw = FrozenDraw(0)
    eps = [draw.normal_like(f"map[{k}]", w).T.flatten() for k, w in enumerate(weights)]
    for row in range(ROWS):
        scaled = plain.weight * (1 + coef[row].sqrt() * torch.cat(eps))
        torch.testing.assert_close(sample[row], plain(h[row], scaled))


@pytest.mark.parametrize("estimator", ["flipout", "auto"])
@pytest.mark.parametrize(("irreps_in", "irreps_out"), IRREPS[1:])
def test_samples_of_a_linear_turn_and_reflect_with_their_input(
    float64, irreps_in, irreps_out, estimator
):
    layer = make_stochastic(linear(irreps_in, irreps_out), "map")
    h, coef = torch.randn(ROWS, layer.irreps_in.dim), torch.rand(ROWS)
    turn = -o3.rand_matrix()
    turn_in, turn_out = (i.D_from_matrix(turn) for i in (layer.irreps_in, layer.irreps_out))

    def sample(x: torch.Tensor) -> torch.Tensor:
        with noise.use(Noise({"map": coef}, noise.generators(0, 3), estimator)):
            return layer(x.repeat(3, 1))

    expected = sample(h) @ turn_out.T
    torch.testing.assert_close(sample(h @ turn_in.T), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(expected, layer(h.repeat(3, 1)) @ turn_out.T, atol=1e-2)


def test_local_noise_is_refused_where_a_linear_mixes_vectors():
    layer = make_stochastic(linear(*IRREPS[1]), "map")
    local = Noise({"map": torch.ones(2)}, noise.generators(0, 1), "local")
    with noise.use(local), pytest.raises(InputError, match="breaks equivariance"):
        layer(torch.randn(2, layer.irreps_in.dim))


def test_linears_without_a_flat_weight_of_their_own_are_left_alone():
    assert kind_of(linear("4x0e", "4x0e")) is not None
    assert kind_of(o3.Linear("4x0e", "4x0e", internal_weights=False)) is None
    assert kind_of(o3.Linear("4x0e", "4x0e", f_in=2, f_out=3)) is None


@pytest.mark.parametrize("last_activation", [False, True])
def test_a_radial_network_is_sampled_with_its_normalisation_and_activation(
    float64, last_activation
):
    torch.manual_seed(0)
    network = FullyConnectedNet(
        [3, 8, 5], torch.nn.functional.silu, 0.7, 1.3, out_act=last_activation
    )
    h, coef = torch.randn(ROWS, 3), torch.rand(ROWS)
    before, plain = network(h), copy.deepcopy(network)
    make_stochastic(network.layer0, "first")
    make_stochastic(network.layer1, "second")
    assert torch.equal(network(h), before)
    with noise.use(frozen(coef, "first", "second")):
        sample = network(h)
    draw = FrozenDraw(0)
    for row in range(ROWS):
        twin = copy.deepcopy(plain)
        for layer, name in ((twin.layer0, "first"), (twin.layer1, "second")):
            eps = draw.normal_like(name, layer.weight.T).T
            layer.weight.data *= 1 + coef[row].sqrt() * eps
        torch.testing.assert_close(sample[row], twin(h[row : row + 1])[0])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_converted_layers_are_copied_with_their_compiled_code(duplicate):
    layer = make_stochastic(linear(*IRREPS[1]), "map")
    twin, h = duplicate(layer), torch.randn(ROWS, layer.irreps_in.dim)
    assert isinstance(twin, StochasticMap)
    assert twin.state_dict().keys() == layer.state_dict().keys()
    assert torch.equal(twin(h), layer(h))
    coef = torch.rand(ROWS)
    with noise.use(frozen(coef, "map")):
        expected = layer(h)
    with noise.use(frozen(coef, "map")):
        assert torch.equal(twin(h), expected)
    assert type(make_plain(twin)) is o3.Linear


def test_a_pickle_needs_no_registration_where_it_is_read(tmp_path):
    layer = make_stochastic(linear(*IRREPS[1]), "map")
    (tmp_path / "layer.pickle").write_bytes(pickle.dumps(layer))
    code = (
        "import pickle, sys; from pathlib import Path;"
        "layer = pickle.loads(Path(sys.argv[1]).read_bytes());"
        "print(type(layer).__name__, len(layer.map_kind.shapes(layer, 'map')))"
    )
    unpickle = {**os.environ, e3nn_maps.UNPICKLE_ANYTHING: "1"}  # e3nn 0.4 cannot do without
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "layer.pickle"],
        env=unpickle,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["StochasticLinear", "3"], done.stderr


def test_couplings_get_all_digits_of_double_precision():
    product = o3.FullTensorProduct("1o + 2e", "1o + 2e").double()
    irreps_out = product.irreps_out
    torch.manual_seed(0)
    x, y = torch.randn(2, 5, 8, dtype=torch.float64)

    def error() -> float:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            turn = o3.rand_matrix()
            turn_in = o3.Irreps("1o + 2e").D_from_matrix(turn)
            turn_out = irreps_out.D_from_matrix(turn)
        finally:
            torch.set_default_dtype(before)
        turned = product(x @ turn_in.T, y @ turn_in.T)
        return float((turned - product(x, y) @ turn_out.T).abs().max())

    rounded = product(x, y)
    assert error() > 1e-9
    e3nn_maps.refine_couplings(product)
    assert error() < 1e-13
    torch.testing.assert_close(product(x, y), rounded, rtol=0, atol=1e-5)


@pytest.mark.parametrize("before", [None, "0"])
def test_nothing_of_an_import_stays_in_the_process(monkeypatch, capsys, before):
    name = e3nn_maps.UNPICKLE_ANYTHING
    if before is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, before)
    with pytest.raises(KeyError), e3nn_maps.contained():  # noqa: PT012
        assert os.environ[name] == "1"
        print("cuequivariance is not available")
        os.environ[name] = "1"  # as mace does
        raise KeyError
    assert os.environ.get(name) == before
    assert capsys.readouterr().out == ""


def test_nequips_scalar_layer(float64):
    pytest.importorskip("nequip", reason="nequip is not installed")
    e3nn_maps.register_nequip()
    from nequip.nn.mlp import ScalarLinearLayer

    layer = ScalarLinearLayer(4, 3, alpha=0.5, bias=True)
    layer.bias.data.normal_()
    h, coef = torch.randn(ROWS, 4), torch.rand(ROWS)
    before = layer(h)
    make_stochastic(layer, "map")
    assert torch.equal(layer(h), before)
    with noise.use(frozen(coef, "map")):
        sample = layer(h)
    eps = FrozenDraw(0).normal_like("map", layer.weight.T).T
    for row in range(ROWS):
        weight = layer.weight * layer.alpha * (1 + coef[row].sqrt() * eps)
        torch.testing.assert_close(sample[row], h[row] @ weight + layer.bias)
