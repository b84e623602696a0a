"""Backbones: the contract, and each model against its equations written out atom by atom."""

import json
import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import ClassVar

import pytest
import torch
from ase import Atoms
from ase.build import molecule
from torch import Tensor, nn

from blips import keys, testing
from blips.backbones import BACKBONES, PaiNN, SchNet, build
from blips.backbones.base import AtomisticBackbone
from blips.backbones.derivatives import energy_and_derivatives
from blips.backbones.painn import NORM_SMOOTHING
from blips.data.graph import AtomGraph, Graph
from blips.errors import ConfigError, InputError
from studies.nbody import EGNN, ParticleGraph
from studies.nbody.checks import random_particles

CUTOFF = 3.5


@pytest.fixture(params=["painn", "schnet"])
def atomistic(request: pytest.FixtureRequest):
    torch.manual_seed(0)
    return build(request.param, cutoff=CUTOFF, features=16, blocks=3, num_basis=6)


def test_atomistic_backbones_keep_the_contract(atomistic: PaiNN | SchNet):
    testing.check_contract(atomistic)


# ---- models against their equations ----


@pytest.mark.usefixtures("float64")
def test_painn_is_its_equations():
    torch.manual_seed(1)
    model = PaiNN(cutoff=CUTOFF, features=8, blocks=3, num_basis=4)
    model.reference.set({7: -1.0, 1: 0.5, 14: 2.0}, scale=3.0)
    graph = model.graph(testing.random_structure(3))
    width = 8
    s = [model.embedding.weight[z] for z in graph.numbers]
    v = [torch.zeros(3, width) for _ in s]
    for block in model.blocks:
        phi = [_pad(block.message.sender(one), width) for one in s]
        s_new, v_new = list(s), list(v)
        for (i, j), vector in zip(graph.edge_index.T.tolist(), graph.vectors(), strict=True):
            r = vector.norm()
            n = torch.arange(1, 5)
            radial = torch.sin(n * math.pi * r / CUTOFF) / r
            envelope = 0.5 * (1 + torch.cos(math.pi * r / CUTOFF))
            g_s, g_u, g_v = phi[j] * _pad(block.message.filter(radial), width) * envelope
            s_new[i] = s_new[i] + g_s
            v_new[i] = v_new[i] + torch.outer(vector / r, g_u) + g_v * v[j]
        s, v = s_new, v_new
        for i in range(len(s)):
            u_v, v_v = block.update.mixing(v[i]).chunk(2, dim=-1)
            norm = ((v_v**2).sum(0) + NORM_SMOOTHING).sqrt()
            a_ss, a_sv, a_vv = _pad(block.update.gates(torch.cat([s[i], norm])), width)
            s[i] = s[i] + a_ss + a_sv * (u_v * v_v).sum(0)
            v[i] = v[i] + a_vv * u_v
    shifts = torch.tensor([{7: -1.0, 1: 0.5, 14: 2.0}[int(z)] for z in graph.numbers])
    expected = 3.0 * torch.stack([model.readout(one)[0] for one in s]) + shifts
    torch.testing.assert_close(model(graph)[keys.ENERGIES], expected)


def _pad(parts: Tensor, width: int) -> Tensor:
    """[2F or 3F] -> [3, F]; parts that a block does without are zero."""
    return torch.cat([parts, parts.new_zeros(3 * width - len(parts))]).view(3, width)


@pytest.mark.usefixtures("float64")
def test_schnet_is_its_equations():
    torch.manual_seed(1)
    model = SchNet(cutoff=CUTOFF, features=8, blocks=2, num_basis=5)
    graph = model.graph(testing.random_structure(3))
    x = [model.embedding.weight[z] for z in graph.numbers]
    spacing = CUTOFF / 4
    for block in model.blocks:
        received = [torch.zeros(8) for _ in x]
        for (i, j), vector in zip(graph.edge_index.T.tolist(), graph.vectors(), strict=True):
            r = vector.norm()
            gaussians = torch.exp(-0.5 * ((r - spacing * torch.arange(5)) / spacing) ** 2)
            first, _, second = block.filter
            filters = second(_shifted_softplus(first(gaussians)))
            envelope = 0.5 * (1 + torch.cos(math.pi * r / CUTOFF))
            received[i] = received[i] + block.sender(x[j]) * filters * envelope
        first, _, second = block.update
        x = [a + second(_shifted_softplus(first(b))) for a, b in zip(x, received, strict=True)]
    expected = torch.stack([model.readout(one)[0] for one in x])
    torch.testing.assert_close(model(graph)[keys.ENERGIES], expected)


def _shifted_softplus(x: Tensor) -> Tensor:
    return torch.log(0.5 * torch.exp(x) + 0.5)


# ---- training and roles ----


def test_every_parameter_learns_from_energies_and_forces(atomistic: PaiNN | SchNet):
    graph = atomistic.graph([testing.random_structure(s) for s in range(2)])
    out = energy_and_derivatives(
        lambda g: atomistic(g)[keys.ENERGIES], graph, stress=True, create_graph=True
    )
    loss = out[keys.ENERGY].square().sum() + out[keys.FORCES].square().sum()
    (loss + out[keys.STRESS].square().sum()).backward()
    for name, parameter in atomistic.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert bool((parameter.grad != 0).any()), name


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [
        ("painn", set()),
        ("schnet", set()),
    ],
)
def test_maps_without_a_role_are_the_known_ones(name: str, deterministic: set[str]):
    model = build(name)
    maps = [n for n, module in model.named_modules() if isinstance(module, nn.Linear)]
    without = {n for n in maps if not any(fnmatchcase(n, pattern) for pattern in model.roles)}
    assert without == deterministic


def test_graph_has_the_models_precision(atomistic: PaiNN | SchNet):
    assert atomistic.graph(molecule("H2O")).positions.dtype == torch.float32
    assert atomistic.double().graph(molecule("H2O")).positions.dtype == torch.float64


def test_a_lone_atom_has_its_own_energy_and_no_force(atomistic: PaiNN | SchNet):
    alone, apart = atomistic.graph(Atoms("N")), atomistic.graph(Atoms("NH", [[0, 0, 0], [9, 0, 0]]))
    out = energy_and_derivatives(lambda g: atomistic(g)[keys.ENERGIES], alone)
    assert out[keys.FORCES].tolist() == [[0.0, 0.0, 0.0]]
    torch.testing.assert_close(out[keys.ENERGIES][0], atomistic(apart)[keys.ENERGIES][0].detach())


# ---- building ----


@pytest.mark.parametrize("name", BACKBONES)
def test_hyperparameters_rebuild_the_model(name: str):
    model = build(name)
    again = build(name, **json.loads(json.dumps(model.hyperparameters)))
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in again.state_dict().items()
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "pain"}, "did you mean 'painn'"),
        ({"name": "zzz"}, r"Valid: (ani, )?chgnet, "),
        ({"name": "painn", "feature": 3}, "did you mean 'features'"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(arguments: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        build(**arguments)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("painn", {"cutoff": 0.0}),
        ("painn", {"blocks": 0}),
        ("schnet", {"features": 1}),
    ],
)
def test_impossible_hyperparameters_are_refused(name: str, setting: dict):
    with pytest.raises(InputError, match=rf"{next(iter(setting))} must be"):
        build(name, **setting)


def test_graphs_of_the_wrong_kind_are_refused():
    atoms = AtomGraph.from_atoms(molecule("H2O"), CUTOFF)
    particles = ParticleGraph.from_arrays(*random_particles(0))
    for model, graph in ((PaiNN(), particles), (SchNet(), particles), (EGNN(), atoms)):
        for method in (model.forward, model.row_features):
            with pytest.raises(InputError, match="needs a"):
                method(graph)


# ---- the checks themselves: each finds what it is there for ----


def _pair_energies(graph: Graph, weight: Callable[[Tensor], Tensor]) -> Tensor:
    distance = graph.vectors().norm(dim=1)
    return distance.new_zeros(graph.num_nodes).index_add(0, graph.edge_index[0], weight(distance))


def _smooth(distance: Tensor) -> Tensor:
    return (1 - distance / CUTOFF).clamp(min=0) ** 3


class Checked(AtomisticBackbone):
    """A function from graphs to atomic energies, as a backbone."""

    roles: ClassVar = {}

    def __init__(self, function: str = "sound") -> None:
        super().__init__(CUTOFF)
        self.hyperparameters = {"function": function}
        self.energies_of = _broken(function)
        self.unused = nn.Linear(1, 1)  # which gives the model a dtype

    def forward(self, graph: Graph) -> dict[str, Tensor]:
        return {keys.ENERGIES: self.energies_of(graph)}


def _broken(kind: str) -> Callable[[AtomGraph], Tensor]:
    def energies_of(graph: AtomGraph) -> Tensor:
        x, energies = graph.positions, _pair_energies(graph, _smooth)
        first, mean = x[0], energies.mean()
        match kind:
            case "sound":
                return energies
            case "rotation":
                return energies + _pair_energies(graph, _smooth) * graph.cell[0, 0, 0]
            case "reflection":
                directions = [_net_direction(graph, power) for power in (1, 2, 3)]
                return energies + torch.linalg.det(torch.stack(directions, dim=1))
            case "translation":
                return energies + x.sum(1).sin()
            case "permutation":
                return energies + 0.1 * torch.arange(len(x))
            case "batching":
                return energies + mean
            case "smoothness":
                return _pair_energies(graph, torch.exp)
            case "forces":
                return energies + first.detach().sum() + energies.detach()
            case "stress":
                return energies * graph.volumes().detach()[graph.structure]
            case "precision":
                return energies + 0.01 * (x.dtype == torch.float32)
            case "second_derivatives":
                return energies + _net_direction(graph).norm(dim=1)
        raise ValueError(kind)

    return energies_of


def _net_direction(graph: AtomGraph, power: int = 1) -> Tensor:
    vectors = graph.vectors()
    rows = vectors * _smooth(vectors.norm(dim=1))[:, None] ** power
    return vectors.new_zeros(graph.num_nodes, 3).index_add(0, graph.edge_index[0], rows)


@pytest.mark.parametrize("name", testing.SYMMETRIES)
def test_each_broken_symmetry_is_found(name: str):
    with pytest.raises(AssertionError, match=name):
        testing.check_symmetry(Checked(name), testing.random_structure(0), name)
    testing.check_symmetry(Checked(), testing.random_structure(0), name)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ("batching", "batching"),
        ("smoothness", "smoothness"),
        ("forces", "finite differences"),
        ("stress", "finite strain"),
        ("precision", "precision"),
        ("second_derivatives", "not finite"),
    ],
)
def test_each_check_finds_its_fault(check: str, message: str):
    arguments: dict = {}
    if check == "batching":
        arguments["structures"] = [testing.random_structure(s) for s in range(2)]
    elif check not in ("smoothness", "second_derivatives"):
        arguments["atoms"] = testing.random_structure(0)
    with pytest.raises(AssertionError, match=message):
        getattr(testing, f"check_{check}")(Checked(check), **arguments)


def test_handed_energies_pass_the_check_of_rotation():
    testing.check_symmetry(Checked("reflection"), testing.random_structure(0), "rotation")


def test_a_faultless_function_has_the_right_forces_and_stress():
    for check in (testing.check_forces, testing.check_stress):
        check(Checked(), testing.random_structure(0))


def test_a_wrong_role_is_found():
    class Mistaken(PaiNN):
        roles = PaiNN.roles | {"blocks.*.message.filter": keys.NODE}

    model = Mistaken(cutoff=CUTOFF, features=8)
    with pytest.raises(AssertionError, match="filter"):
        testing.check_declarations(model, model.graph(testing.random_structure(0)))
