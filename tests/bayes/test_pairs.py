"""Maps of pairs of nodes, worked out on the nodes, against the same map of rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import blips
from blips.backbones.base import pair_rows
from blips.bayes import kernels, noise
from blips.bayes.estimators import local_linear
from blips.bayes.noise import SampledNoise
from blips.bayes.pairs import PairRows, add_ends_, local_of_pairs, sum_at_ends
from blips.config import load_config
from blips.train.objective import Objective
from studies.nbody import EGNN, GNN, ParticleData

NODES, PAIRS, WIDTH, OWN, OUT = 6, 15, 5, 3, 20
NAMES = ("node", "pair", "weight", "bias", "coef")


def problem(dtype=torch.float64, samples=1, *, seed=0, own=OWN) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    tensors = {
        "node": normal(samples * NODES, WIDTH),
        "pair": normal(samples * PAIRS, own),
        "weight": normal(OUT, 2 * WIDTH + own),
        "bias": normal(OUT),
        "coef": torch.rand(samples * PAIRS, generator=generator, dtype=dtype) + 0.1,
    }
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def edges(samples=1, seed=0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    one = torch.randint(NODES, (2, PAIRS), generator=generator)
    return torch.cat([one + k * NODES for k in range(samples)], dim=1)


def both_ways(p: dict[str, Tensor], samples=1, seed=0, *, bias=True) -> list[Tensor]:
    """Sampled outputs: on the nodes, and on the rows; with the same noise."""
    h = PairRows(p["node"], p["pair"], edges(samples, seed))
    rest = (p["weight"], p["bias"] if bias else None, p["coef"])
    on_nodes = local_of_pairs(h, *rest, noise.generators(3, samples))
    return [on_nodes, local_linear(h.rows(), *rest, noise.generators(3, samples))]


@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    samples=st.integers(1, 3),
    own=st.integers(1, 4),
    bias=st.booleans(),
)
def test_on_nodes_is_the_map_of_the_rows(seed, dtype, samples, own, bias):
    p = problem(dtype, samples, seed=seed, own=own)
    found = both_ways(p, samples, seed, bias=bias)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(*found, **close)
    upstream = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    asked = [p[name] for name in NAMES if bias or name != "bias"]
    gradients = [torch.autograd.grad(z, asked, upstream) for z in found]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, **close)


def test_without_compiled_code_it_is_the_same(monkeypatch):
    def gradients() -> list[Tensor]:
        p = problem(torch.float32)
        z = both_ways(p)[0]
        return [z, *torch.autograd.grad(z.square().sum(), [p[name] for name in NAMES])]

    compiled = gradients()
    monkeypatch.setattr(kernels, "library", lambda: None)
    for a, b in zip(compiled, gradients(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_sums_at_the_ends_are_the_gradient_of_what_ends_add():
    ends = torch.randn(NODES, 2 * OUT, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(PAIRS, OUT, dtype=torch.float64)
    z = add_ends_(torch.zeros(PAIRS, OUT, dtype=torch.float64), ends, edges())
    (expected,) = torch.autograd.grad(z, ends, upstream)
    torch.testing.assert_close(sum_at_ends(upstream, edges(), NODES), expected)


def test_second_derivatives_are_those_of_the_rows():
    p = problem()
    asked = [p[name] for name in NAMES]
    found = []
    for z in both_ways(p):
        first = torch.autograd.grad(z.sin().sum(), p["node"], create_graph=True)[0]
        found.append(torch.autograd.grad(first.square().sum(), asked))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_to_torch_pairs_are_the_tensor_of_rows():
    p = problem()
    h = PairRows(p["node"], p["pair"], edges())
    first, second = edges()
    rows = torch.cat([p["node"][first], p["node"][second], p["pair"]], dim=1)
    assert h.shape == rows.shape
    assert h.ndim == 2
    assert torch.equal(torch.nn.functional.linear(h, p["weight"]), rows @ p["weight"].T)  # pyright: ignore


@pytest.mark.parametrize("estimator", ["auto", "local", "flipout"])
def test_only_sampled_passes_see_lazy_rows(estimator):
    p = problem()
    sampled = SampledNoise({}, generators=noise.generators(0, 1), estimator=estimator)
    assert isinstance(pair_rows(p["node"], p["pair"], edges()), Tensor)
    with noise.use(sampled):
        assert isinstance(pair_rows(p["node"], p["pair"], edges()), PairRows)


@pytest.mark.parametrize("backbone", [EGNN, GNN])
@pytest.mark.parametrize("exclude", [(), ("layers.0.message.0",)])
def test_training_step_is_that_of_rows(backbone, exclude, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 3, 5, 3, generator=generator).numpy()
    charges = torch.randn(3, 5, generator=generator).sign().numpy()
    batch = ParticleData(x, v, charges, x + v).batch(range(3))
    torch.manual_seed(0)
    model = blips.bayesianize(backbone(hidden=16, layers=2), exclude=exclude)
    config = load_config({"training": {"loss": "mse"}}).training

    def gradients() -> list[Tensor]:
        model.zero_grad()
        Objective(model, config, 10)(batch, ("test", 0), 1.0).total.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    on_nodes = gradients()
    as_rows = lambda *parts: PairRows(*parts).rows()  # noqa: E731
    monkeypatch.setattr(f"{backbone.__module__}.pair_rows", as_rows)
    on_rows = gradients()
    assert len(on_nodes) == len(on_rows)
    for a, b in zip(on_nodes, on_rows, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
