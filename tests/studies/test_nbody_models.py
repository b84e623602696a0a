"""Models of charged particles against their equations, and their graphs and data."""

import itertools
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import studies.nbody
from blips.backbones import build
from blips.errors import InputError
from studies.nbody import EGNN, GNN, ParticleData, ParticleGraph
from studies.nbody.checks import check_contract, random_particles
from studies.nbody.data import POSITIONS


@pytest.fixture(params=["egnn", "gnn"])
def particle(request: pytest.FixtureRequest):
    torch.manual_seed(0)
    return build(request.param, hidden=16, layers=3)


def test_particle_backbones_keep_the_contract(particle: EGNN | GNN):
    equivariant = isinstance(particle, EGNN)
    check_contract(particle, equivariant=equivariant)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("particles", [1, 4])
def test_egnn_is_its_equations(particles: int):
    torch.manual_seed(1)
    model = EGNN(hidden=8, layers=3)
    positions, v, q = (array[0] for array in random_particles(0, 1, particles))
    x = list(positions)
    h = [model.embedding(v[i].norm().view(1)) for i in range(particles)]
    for layer in model.layers:
        m = {
            (i, j): layer.message(
                torch.cat(
                    [
                        h[i],
                        h[j],
                        ((x[i] - x[j]) ** 2).sum().view(1),
                        (q[i] * q[j]).view(1),
                        ((positions[i] - positions[j]) ** 2).sum().view(1),
                    ]
                )
            )
            for i in range(particles)
            for j in range(particles)
            if i != j
        }
        moved = []
        for i in range(particles):
            pushes = [(x[i] - x[j]) * layer.coordinate(m[i, j]) for j in range(particles) if i != j]
            push = torch.stack(pushes).mean(0) if pushes else torch.zeros(3)
            moved.append(x[i] + push + layer.velocity(h[i]) * v[i])
        if layer.update is not None:
            sums = [
                sum((m[i, j] for j in range(particles) if i != j), torch.zeros(8))
                for i in range(particles)
            ]
            pairs = zip(h, sums, strict=True)
            h = [one + layer.update(torch.cat([one, total])) for one, total in pairs]
        x = moved
    graph = ParticleGraph.from_arrays(positions[None], v[None], q[None])
    torch.testing.assert_close(model(graph)[POSITIONS], torch.stack(x))


@pytest.mark.usefixtures("float64")
def test_gnn_is_its_equations():
    torch.manual_seed(1)
    model = GNN(hidden=8, layers=2)
    x, v, q = (array[0] for array in random_particles(0, 1, 4))
    h = [model.embedding(torch.cat([x[i], v[i]])) for i in range(4)]
    for layer in model.layers:
        sums = [torch.zeros(8) for _ in h]
        for i in range(4):
            for j in set(range(4)) - {i}:
                pair = torch.stack([q[i] * q[j], ((x[i] - x[j]) ** 2).sum()])
                sums[i] = sums[i] + layer.message(torch.cat([h[i], h[j], pair]))
        h = [a + layer.update(torch.cat([a, b])) for a, b in zip(h, sums, strict=True)]
    graph = ParticleGraph.from_arrays(x[None], v[None], q[None])
    expected = torch.stack([model.decoder(one) for one in h])
    torch.testing.assert_close(model(graph)[POSITIONS], expected)


@pytest.mark.usefixtures("float64")
def test_untrained_egnn_hardly_pushes_particles():
    torch.manual_seed(0)
    positions, velocities, charges = random_particles(0)
    at_rest = ParticleGraph.from_arrays(positions, 0 * velocities, charges)
    moved = EGNN()(at_rest)[POSITIONS].detach() - at_rest.positions
    assert 0 < float(moved.abs().max()) < 0.05


def test_every_particle_parameter_learns(particle: EGNN | GNN):
    graph = ParticleGraph.from_arrays(*random_particles(0)).to(dtype=torch.float32)
    particle(graph)[POSITIONS].square().sum().backward()
    for name, parameter in particle.named_parameters():
        assert parameter.grad is not None, name
        assert bool((parameter.grad != 0).any()), name


@given(simulations=st.integers(1, 3), particles=st.integers(1, 5))
def test_particles_are_connected_to_all_others_of_their_simulation(
    simulations: int, particles: int
):
    arrays = random_particles(0, simulations, particles)
    graph = ParticleGraph.from_arrays(*arrays)
    expected = {
        (m * particles + i, m * particles + j)
        for m in range(simulations)
        for i, j in itertools.permutations(range(particles), 2)
    }
    assert set(map(tuple, graph.edge_index.T.tolist())) == expected
    assert graph.num_edges == len(expected)
    assert graph.structure.bincount().tolist() == [particles] * simulations
    assert torch.equal(graph.charges.view(simulations, particles), arrays[2])


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 5, 3), (2, 5, 2), (2, 5)),
        ((2, 5, 2), (2, 5, 2), (2, 5)),
        ((10, 3), (10, 3), (10,)),
        ((2, 5, 3), (2, 5, 3), (2, 4)),
    ],
)
def test_particle_arrays_of_wrong_shape_are_refused(shapes: tuple[tuple[int, ...], ...]):
    with pytest.raises(InputError, match="must"):
        ParticleGraph.from_arrays(*map(torch.zeros, shapes))


def particles(count: int = 7) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    positions, velocities, targets = torch.randn(3, count, 5, 3, generator=generator)
    return positions, velocities, torch.randn(count, 5, generator=generator), targets


def test_particle_batches_index_the_arrays():
    positions, velocities, charges, targets = particles()
    data = ParticleData(positions, velocities, charges[..., None].numpy(), targets.numpy())
    batch = data.batch([4, 0])
    assert isinstance(batch.graph, ParticleGraph)
    assert batch.graph.num_structures == 2
    assert batch.graph.num_edges == 2 * 5 * 4
    torch.testing.assert_close(batch.graph.positions[:5], positions[4])
    torch.testing.assert_close(batch.graph.charges[5:], charges[0])
    torch.testing.assert_close(batch.graph.velocities[5:], velocities[0])
    torch.testing.assert_close(batch.targets[POSITIONS][:5], targets[4])
    assert data.name_of(4) == "simulations, simulation 4"


def test_particle_arrays_must_fit():
    positions, velocities, charges, targets = particles()
    with pytest.raises(InputError, match=r"\(7, 5, 3\).*\(6, 5, 3\)"):
        ParticleData(positions, velocities, charges, targets[1:])
    with pytest.raises(InputError, match=r"\(7, 5, 3\).*expected"):
        ParticleData(positions, velocities, positions, targets)


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [("egnn", {"embedding"}), ("gnn", {"embedding", "decoder.0", "decoder.2"})],
)
def test_maps_without_a_role_are_the_known_ones(name: str, deterministic: set[str]):
    model = build(name)
    maps = [n for n, module in model.named_modules() if isinstance(module, nn.Linear)]
    without = {n for n in maps if not any(fnmatchcase(n, pattern) for pattern in model.roles)}
    assert without == deterministic


@pytest.mark.parametrize(("name", "setting"), [("egnn", {"layers": 0}), ("gnn", {"hidden": -1})])
def test_impossible_hyperparameters_are_refused(name: str, setting: dict):
    with pytest.raises(InputError, match=rf"{next(iter(setting))} must be"):
        build(name, **setting)


def test_the_code_of_the_notes_runs(tmp_path, monkeypatch):
    text = (Path(studies.nbody.__file__).parent / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    x, v, charges = random_particles(0, simulations=8)
    names = {"x": x, "v": v, "charges": charges, "x_later": x + v}
    monkeypatch.chdir(tmp_path)
    exec(code, names)
    assert names["mean"].shape == names["std"].shape == (40, 3)
    assert (names["std"] > 0).all()
