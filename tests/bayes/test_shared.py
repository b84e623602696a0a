"""Rows and coefficients that the samples of a prediction share, against the plain way."""

from dataclasses import replace

import pytest
import torch
from ase.build import bulk, molecule
from torch import Tensor

import blips
from blips.backbones import PaiNN, SchNet
from blips.backbones.base import AtomisticBackbone, edge_lengths
from blips.backbones.derivatives import energy_and_derivatives
from blips.bayes import kernels, noise
from blips.bayes.functions import flipout
from blips.bayes.noise import SampledNoise
from blips.bayes.random import BitSource, sign_bits
from blips.bayes.shared import EdgeRows, shared_flipout, with_slope
from blips.bayes.weights import SHARING, WeightNoise

EDGES, WIDTH, OUT = 7, 5, 40


def waves(length: Tensor) -> Tensor:
    """[E] -> [E, WIDTH]."""
    return torch.sin(length[:, None] * torch.arange(1, WIDTH + 1, dtype=length.dtype))


def lengths(samples: int, dtype=torch.float64) -> Tensor:
    one = torch.linspace(0.5, 3.0, EDGES, dtype=dtype)
    return one.repeat(samples).requires_grad_()


def test_slopes_are_derivatives():
    x = torch.linspace(0.1, 2.0, 9, dtype=torch.float64)
    value, slope = with_slope(waves, x)
    n = torch.arange(1, WIDTH + 1)
    assert torch.equal(value, waves(x))
    torch.testing.assert_close(slope, n * torch.cos(x[:, None] * n))


def test_to_torch_shared_rows_are_the_tensor_with_its_gradient():
    length = lengths(3)
    rows = EdgeRows.of(waves, length, 3)
    plain = waves(length)
    assert rows.shape == plain.shape
    weight = torch.randn(OUT, WIDTH, dtype=torch.float64)
    upstream = torch.randn(3 * EDGES, OUT, dtype=torch.float64)
    found = [torch.nn.functional.linear(x, weight) for x in (rows, plain)]  # pyright: ignore
    torch.testing.assert_close(*found, rtol=0, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(z, length, upstream)[0] for z in found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("piece", [2**17, 3 * OUT])
def test_a_map_of_shared_rows_is_flipout_with_signs_in_common(dtype, piece, monkeypatch):
    monkeypatch.setattr("blips.bayes.shared.PIECE", piece)
    samples, groups = 5, 2
    group = torch.tensor([0, 0, 1, 1, 1])
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(OUT, WIDTH, generator=generator, dtype=dtype)
    bias = torch.randn(OUT, generator=generator, dtype=dtype)
    deviation = torch.randn(groups, OUT, WIDTH, generator=generator, dtype=dtype)
    coef = torch.rand(samples * EDGES, generator=generator, dtype=dtype).requires_grad_()
    upstream = torch.randn(samples * EDGES, OUT, generator=generator, dtype=dtype)
    (bits_in,) = sign_bits(BitSource(noise.generators(1, groups)), EDGES, WIDTH)
    (bits_out,) = sign_bits(BitSource(noise.generators(2, samples)), EDGES, OUT)

    length = lengths(samples, dtype)
    rows = EdgeRows.of(waves, length, samples)
    shared = shared_flipout(rows, weight, bias, coef, deviation, group, bits_in, bits_out)
    of_sample = bits_in.view(groups, EDGES, -1, 1)[group].flatten(0, 1)
    plain = flipout(waves(length), weight, bias, coef, deviation[group], None, of_sample, bits_out)
    close = {"rtol": 1e-5, "atol": 1e-5 if dtype == torch.float32 else 1e-12}
    torch.testing.assert_close(shared, plain, **close)
    gradients = [torch.autograd.grad(z, (length, coef), upstream) for z in (shared, plain)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, **close)


def test_samples_of_shared_rows_have_the_variance_of_the_posterior_and_no_correlation():
    samples = 4096
    torch.manual_seed(0)
    weight, h = torch.randn(3, WIDTH, dtype=torch.float64), waves(torch.tensor([0.7, 1.9]).double())
    kept, rows = WeightNoise(0, range(samples)), EdgeRows(h, h, torch.zeros(2 * samples))
    deviation = kept.of_groups("map", weight)
    bits_in = kept.input_signs("map", 2, WIDTH, weight.device)
    (bits_out,) = sign_bits(BitSource(noise.generators(0, samples)), 2, 3)
    coef = torch.full((2 * samples,), 0.3, dtype=torch.float64)
    z = shared_flipout(rows, weight, None, coef, deviation, kept.group_of_sample, bits_in, bits_out)
    z = z.view(samples, 6) - (h @ weight.T).flatten()
    expected = 0.3 * (h.square() @ weight.square().T).flatten()
    # groups of SHARING have one |noise|: as many independent variances as there are groups
    error = (2 / (samples / SHARING)) ** 0.5
    assert ((z.square().mean(0) / expected - 1).abs() < 4 * error).all()
    correlation = torch.corrcoef(z.T) - torch.eye(6)
    assert correlation.abs().max() < 4 / samples**0.5 * 1.5
    neighbours = (z[:-1] * z[1:]).mean(0) / expected  # most of them of one group
    assert neighbours.abs().max() < 5 / samples**0.5


@pytest.mark.parametrize("backbone", [PaiNN, SchNet])
@pytest.mark.parametrize("clamp", ["smooth", "hard"])
def test_shared_coefficients_are_those_of_the_network_with_their_gradients(backbone, clamp):
    torch.manual_seed(0)
    model = backbone(cutoff=4.0, features=8, blocks=2, num_basis=6).double()
    potential = blips.bayesianize(model, encoder={"clamp": clamp})
    graph = model.graph([molecule("CH3OH"), bulk("Si")])
    shared = model.shared_coefficients(potential.encoder, graph)
    assert shared is not None
    many = graph.replicate(3)

    def gradient(coefficients) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        total = torch.zeros((), dtype=torch.float64)
        for name in sorted(coefficients):
            weights = torch.randn(len(coefficients[name]), generator=generator).double()
            total = total + (weights * coefficients[name]).sum()
        return torch.autograd.grad(total, positions)[0]

    positions = many.positions.clone().requires_grad_()
    moved = replace(many, positions=positions)
    plain = potential.coefficients(moved)
    quick = shared.at(edge_lengths(moved.vectors()), 3)
    assert plain.keys() == quick.keys()
    for name, coef in plain.items():
        torch.testing.assert_close(quick[name], coef, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(quick), gradient(plain), rtol=1e-10, atol=1e-10)


def test_only_networks_that_see_lengths_alone_are_shared():
    model = PaiNN(cutoff=4.0, features=8, blocks=1, num_basis=4)
    graph = model.graph(molecule("H2O"))
    paper = blips.bayesianize(model, encoder={"variant": "paper-ammonia"})
    assert model.shared_coefficients(paper.encoder, graph) is None

    class Other(PaiNN):
        def row_features(self, graph):
            return AtomisticBackbone.row_features(self, graph)

    other = Other(cutoff=4.0, features=8, blocks=1, num_basis=4)
    potential = blips.bayesianize(other)
    assert other.shared_coefficients(potential.encoder, graph) is None
    assert potential.predict(molecule("H2O"), samples=2).forces_std is not None


@pytest.mark.parametrize("backbone", [PaiNN, SchNet])
@pytest.mark.parametrize("exclude", [(), ("*filter*",)])
def test_forces_of_a_shared_sample_are_derivatives_of_its_energy(backbone, exclude):
    torch.manual_seed(0)
    model = backbone(cutoff=4.0, features=8, blocks=2, num_basis=6).double()
    potential = blips.bayesianize(model, exclude=exclude, initial=0.3)
    atoms = molecule("CH3OH")

    def outputs(displacement: float):
        moved = atoms.copy()
        moved.positions[1, 2] += displacement
        return potential.outputs_of(model.graph(moved), range(3), 0, {"forces": True})

    step = 1e-4
    difference = (outputs(step)["energy"] - outputs(-step)["energy"]) / (2 * step)
    forces = outputs(0.0)["forces"].view(3, len(atoms), 3)[:, 1, 2]
    assert forces.std() > 1e-4
    torch.testing.assert_close(forces, -difference, rtol=1e-6, atol=1e-8)


def test_a_shared_sample_does_not_depend_on_its_chunk():
    torch.manual_seed(0)
    model = PaiNN(cutoff=4.0, features=8, blocks=2, num_basis=6).double()
    potential, graph = blips.bayesianize(model), model.graph(molecule("CH3OH"))
    whole = potential.outputs_of(graph, range(20), 3, {"forces": True})["forces"].view(20, -1, 3)
    for numbers in (range(0, 8), range(7, 10), range(19, 20)):
        part = potential.outputs_of(graph, numbers, 3, {"forces": True})["forces"]
        expected = whole[numbers.start : numbers.stop]
        torch.testing.assert_close(part.view(len(numbers), -1, 3), expected, rtol=0, atol=1e-10)


def test_second_derivatives_go_the_plain_way_or_are_refused():
    model = PaiNN(cutoff=4.0, features=8, blocks=1, num_basis=4).double()
    potential, graph = blips.bayesianize(model), model.graph(molecule("H2O"))
    kept = WeightNoise(0, range(2))
    sample = potential.sample(graph, noise.generators(0, 2), weights=kept, create_graph=True)
    sample.outputs["forces"].square().sum().backward()
    assert model.readout[0].weight.grad is not None

    def energies(graph):
        length = edge_lengths(graph.vectors())
        shared = SampledNoise({}, noise.generators(0, 2), "flipout", kept, shares_edges=True)
        rows = EdgeRows.of(waves, length, shared.replicas)
        return torch.zeros(graph.num_nodes).double() + rows.rows().square().sum()

    outputs = energy_and_derivatives(energies, graph.replicate(2), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        outputs["forces"].sum().backward()


@pytest.mark.skipif(kernels.library() is None, reason="blips was installed without a C compiler")
@pytest.mark.parametrize("channels", [1, 31, 32, 70])
def test_compiled_code_and_torch_give_the_same_numbers(channels):
    samples, rows, groups = 4, 3, 2
    generator = torch.Generator().manual_seed(0)

    def normal(count: int) -> Tensor:
        return torch.randn(count, channels, generator=generator)

    mean, slope, grad = normal(rows), normal(rows), normal(samples * 6)
    u, v = normal(groups * rows), normal(groups * rows)
    group, scale = torch.tensor([0, 1, 1, 0]), torch.rand(samples * 6, generator=generator)
    (bits,) = sign_bits(BitSource(noise.generators(0, samples)), 6, channels)
    places = {"first": 2, "all": 6}

    def noise_by(dtype: torch.dtype) -> Tensor:
        z = torch.zeros(samples * places["all"], channels, dtype=dtype)
        inputs = (mean.to(dtype), u.to(dtype), group, bits, scale.to(dtype))
        kernels.shared_noise_(z, places["first"], *inputs)
        return z.double()

    def slopes_by(dtype: torch.dtype) -> list[Tensor]:
        found = [torch.zeros(samples * places["all"], dtype=dtype) for _ in range(2)]
        inputs = [x.to(dtype) for x in (grad, slope, u, v)]
        kernels.shared_slopes_(*found, places["first"], *inputs, group, bits, scale.to(dtype))
        return [x.double() for x in found]

    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(noise_by(torch.float32), noise_by(torch.float64), **close)
    assert (noise_by(torch.float32).view(samples, 6, -1)[:, [0, 1, 5]] == 0).all()
    for a, b in zip(slopes_by(torch.float32), slopes_by(torch.float64), strict=True):
        torch.testing.assert_close(a, b, **close)
