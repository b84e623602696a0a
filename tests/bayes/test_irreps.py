import copy
import pickle
from itertools import pairwise

import pytest
import torch
from torch import nn

from blips.bayes import noise
from blips.bayes.linear import (
    Block,
    BlockKind,
    _kinds,
    _side_by_side,
    kind_of,
    make_plain,
    make_stochastic,
    register_kind,
)
from blips.bayes.noise import FrozenDraw, FrozenNoise, SampledNoise
from blips.errors import InputError

# (channels, components, parity): scalars, vectors, pseudoscalars, more scalars
SOURCES = [(4, 1, 1), (3, 3, -1), (2, 1, -1), (1, 1, 1)]
TARGETS = [(3, 1, 1), (5, 3, 1), (2, 3, -1), (2, 1, -1)]  # nothing maps to the axial vectors
PATHS = [(0, 0), (3, 0), (1, 2), (2, 3)]  # two blocks add up in the scalars
ROWS = 6


def slices(irreps: list[tuple[int, int, int]]) -> list[slice]:
    ends = [0]
    for mul, dim, _ in irreps:
        ends.append(ends[-1] + mul * dim)
    return [slice(start, stop) for start, stop in pairwise(ends)]


class Equivariant(nn.Module):
    """Blocks in one flat weight, with a normalisation and a bias on the scalars."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [SOURCES[i][0] * TARGETS[o][0] for i, o in PATHS]
        self.weight = nn.Parameter(torch.randn(sum(sizes), dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.sizes = sizes

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        z = [h.new_zeros(len(h), mul, dim) for mul, dim, _ in TARGETS]
        for (i, o), flat in zip(PATHS, self.weight.split(self.sizes), strict=True):
            x = h[:, slices(SOURCES)[i]].view(len(h), *SOURCES[i][:2])
            matrix = flat.view(SOURCES[i][0], TARGETS[o][0]) * 0.5
            z[o] = z[o] + torch.einsum("zui,uw->zwi", x, matrix)
        z[0] = z[0] + self.bias[:, None]
        return torch.cat([part.flatten(1) for part in z], dim=1)


def blocks_of(layer: Equivariant) -> list[Block]:
    return [
        Block(
            flat.view(SOURCES[i][0], TARGETS[o][0]).T * 0.5,
            slices(SOURCES)[i],
            slices(TARGETS)[o],
            SOURCES[i][1],
            SOURCES[i][1:] == (1, 1),
        )
        for (i, o), flat in zip(PATHS, layer.weight.split(layer.sizes), strict=True)
    ]


def width_of(_layer: Equivariant) -> int:
    return slices(TARGETS)[-1].stop


def bias_of(layer: Equivariant) -> torch.Tensor:
    return nn.functional.pad(layer.bias, (0, width_of(layer) - 3))


KIND = BlockKind(Equivariant, blocks_of, width_of, bias_of)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr("blips.bayes.linear._kinds", list(_kinds))
    register_kind(KIND)


@pytest.fixture
def layer() -> Equivariant:
    torch.manual_seed(0)
    return make_stochastic(Equivariant(), "map")


@pytest.fixture
def h() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    size = slices(SOURCES)[-1].stop
    return torch.randn(ROWS, size, generator=generator, dtype=torch.float64)


@pytest.fixture
def coef() -> torch.Tensor:
    return torch.linspace(0.1, 0.6, ROWS, dtype=torch.float64)


def turned(columns: torch.Tensor, irreps: list[tuple[int, int, int]], turn: torch.Tensor):
    """The columns as an orthogonal matrix transforms them."""
    sign = torch.linalg.det(turn).sign()
    parts = []
    for (mul, dim, parity), where in zip(irreps, slices(irreps), strict=True):
        part = columns[:, where].view(len(columns), mul, dim)
        axial = sign if parity == (1 if dim == 3 else -1) else 1.0
        parts.append((axial * (part @ turn.T if dim == 3 else part)).flatten(1))
    return torch.cat(parts, dim=1)


def test_the_mean_is_the_layers_own_forward_bitwise_and_conversion_can_be_undone(layer, h):
    plain = make_plain(copy.deepcopy(layer))
    assert type(plain) is Equivariant
    assert torch.equal(layer(h), plain(h))
    assert layer.weight.ndim == 1
    plain.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("estimator", ["flipout", "auto"])
def test_without_spread_a_sample_is_the_mean(layer, h, estimator):
    tiny = torch.full((ROWS,), 1e-26, dtype=torch.float64)
    with noise.use(SampledNoise({"map": tiny}, noise.generators(0, 2), estimator)):
        sample = layer(h.repeat(2, 1))
    torch.testing.assert_close(sample, layer(h).repeat(2, 1))


def test_a_frozen_draw_is_the_layer_with_other_weights(layer, h, coef):
    draw = FrozenDraw(seed=3)
    with noise.use(FrozenNoise({"map": coef}, [draw])):
        sample = layer(h)
    for row in range(ROWS):
        twin = make_plain(copy.deepcopy(layer))
        eps = [draw.normal_like(f"map[{k}]", b.weight) for k, b in enumerate(blocks_of(twin))]
        flat = torch.cat([e.T.flatten() for e in eps])
        twin.weight.data *= 1 + coef[row].sqrt() * flat
        torch.testing.assert_close(sample[row], twin(h[row : row + 1])[0])


@pytest.mark.statistical
def test_samples_have_the_mean_and_the_covariance_of_random_weights(layer, h, coef):
    """Cov(z_vc, z_vd) = coef sum_u W_vu^2 h_uc h_ud: components covary, channels do not."""
    count = 4000
    with noise.use(SampledNoise({"map": coef}, noise.generators(0, count), "flipout")):
        samples = layer(h.repeat(count, 1)).view(count, ROWS, -1).detach()
    deviations = samples - layer(h).detach()
    expected = torch.zeros(ROWS, *2 * [samples.shape[-1]], dtype=torch.float64)
    for block in blocks_of(layer):
        x = h[:, block.source].view(ROWS, -1, block.dim)
        var = torch.einsum("vu,zuc,zud->zvcd", block.weight.square(), x, x)
        for v, columns in enumerate(
            torch.arange(width_of(layer))[block.target].view(-1, block.dim)
        ):
            expected[:, columns[:, None], columns] += coef[:, None, None] * var[:, v].detach()
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
    turn, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    turn = turn * torch.linalg.det(turn).sign() * (-1 if mirrored else 1)

    def sample(x: torch.Tensor) -> torch.Tensor:
        drawn = (
            FrozenNoise({"map": coef}, [FrozenDraw(0, k) for k in range(3)])
            if estimator == "frozen"
            else SampledNoise({"map": coef}, noise.generators(0, 3), estimator)
        )
        with noise.use(drawn):
            return layer(x.repeat(3, 1))

    expected = turned(sample(h), TARGETS, turn)
    torch.testing.assert_close(sample(turned(h, SOURCES, turn)), expected, rtol=0, atol=1e-12)


def test_local_noise_is_for_scalars_alone(layer, h, coef):
    """Not for pseudoscalars either: noise that does not change sign breaks reflections."""
    local = SampledNoise({"map": coef}, noise.generators(0, 1), "local")
    with noise.use(local), pytest.raises(InputError, match=r"'map\[2\]'.*irrep axis"):
        layer(h)
    scalars = BlockKind(Equivariant, lambda m: blocks_of(m)[:2], width_of, bias_of)
    layer.map_kind = scalars
    with noise.use(SampledNoise({"map": coef}, noise.generators(0, 1), "local")):
        sample = layer(h)
    assert not torch.allclose(sample[:, :3], make_plain(copy.deepcopy(layer))(h)[:, :3])
    pseudoscalars = BlockKind(Equivariant, lambda m: blocks_of(m)[3:], width_of, bias_of)
    layer.map_kind = pseudoscalars
    with noise.use(local), pytest.raises(InputError, match="irrep axis"):
        layer(h)


@pytest.mark.parametrize("estimator", ["flipout", "frozen"])
def test_gradients_reach_the_flat_weight_and_the_input(layer, h, coef, estimator):
    def sample(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, c: torch.Tensor):
        drawn = (
            FrozenNoise({"map": c}, [FrozenDraw(0, k) for k in range(2)])
            if estimator == "frozen"
            else SampledNoise({"map": c}, noise.generators(0, 2), estimator)
        )
        with noise.use(drawn):
            return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, x)

    weight, bias = layer.weight.detach(), layer.bias.detach()
    inputs = (weight, bias, h.repeat(2, 1), coef)
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(sample, leaves, fast_mode=True)


def test_replicas_do_not_depend_on_how_they_are_grouped(layer, h, coef):
    with noise.use(SampledNoise({"map": coef}, noise.generators(3, 4), "flipout")):
        together = layer(h.repeat(4, 1)).view(4, ROWS, -1)
    for k in range(4):
        with noise.use(SampledNoise({"map": coef}, noise.generators(3, 1, first=k), "flipout")):
            torch.testing.assert_close(layer(h), together[k])
    assert not torch.allclose(together[0], together[1])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_need_no_registration(layer, h, coef, duplicate, monkeypatch):
    monkeypatch.setattr("blips.bayes.linear._kinds", [])
    twin = duplicate(layer)
    assert kind_of(make_plain(copy.deepcopy(layer))) is None
    drawn = [SampledNoise({"map": coef}, noise.generators(0, 1), "flipout") for _ in range(2)]
    with noise.use(drawn[0]):
        expected = layer(h)
    with noise.use(drawn[1]):
        assert torch.equal(twin(h), expected)


def test_shapes_without_rows_or_with_more_axes_are_refused(layer, h, coef):
    with (
        noise.use(SampledNoise({"map": coef}, noise.generators(0, 1), "flipout")),
        pytest.raises(InputError, match="channels and components"),
    ):
        layer(h[None])
    empty = SampledNoise({"map": coef[:0]}, noise.generators(0, 2), "flipout")
    with noise.use(empty):
        assert layer(h[:0]).shape == (0, width_of(layer))


def test_columns_without_terms_are_zero():
    h, one = torch.ones(2, 7), torch.ones(2, 2)
    found = _side_by_side(h, {1: [one, 2 * one], 4: [one]}, 7)
    assert found.tolist() == [[0, 3, 3, 0, 1, 1, 0]] * 2


def test_terms_of_one_target_alone_are_their_sum():
    z = torch.arange(6.0).view(2, 3)
    torch.testing.assert_close(_side_by_side(z, {0: [z, 2 * z]}, 3), 3 * z)
