"""Which maps are conditioned: the readout as declared, or as found by trial."""

import pytest
import torch
from torch import Tensor, nn

import blips
from blips import keys
from blips.backbones import Adapter
from blips.data.graph import AtomGraph
from blips.errors import ConversionError, InputError
from blips.inference.linearise import LinearModel
from blips.inference.maps import chosen_roles
from inference.models import boxed_ammonia, central, chosen, normal, small, with_linear_weights

CUTOFF = 3.5


def envelope(graph: AtomGraph) -> Tensor:
    distance = graph.vectors().norm(dim=1, keepdim=True)
    return 0.5 * (1 + torch.cos(torch.pi * distance / CUTOFF))


class Foreign(nn.Module):
    """Messages in two rounds, an update of every atom, and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.filter = nn.Linear(1, 6)
        self.before = nn.Linear(6, 6)
        self.between = nn.Linear(6, 6)
        self.update = nn.Linear(6, 6)
        self.twice = nn.Linear(6, 6)
        self.readout = nn.Sequential(nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 1))

    def forward(self, graph: AtomGraph) -> Tensor:
        receiver, sender = graph.edge_index
        messages = self.filter(envelope(graph))
        h = self.embedding(graph.numbers)
        for layer in (self.before, self.between):
            h = torch.tanh(layer(h))
            h = h.index_add(0, receiver, messages * h[sender])
        h = torch.tanh(self.update(h))
        h = torch.tanh(self.twice(torch.tanh(self.twice(h))))
        return self.readout(h).squeeze(1)


class LinearAfterExchange(nn.Module):
    """The energy is linear in all that follows `first`, also in the exchange between atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, graph: AtomGraph) -> Tensor:
        receiver, sender = graph.edge_index
        z = self.first(self.embedding(graph.numbers))
        sums = torch.zeros_like(z).index_add(0, receiver, envelope(graph) * z[sender])
        return self.last(sums).squeeze(1)


class OnlyMessages(nn.Module):
    """No map follows the exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.before = nn.Linear(6, 1)

    def forward(self, graph: AtomGraph) -> Tensor:
        receiver, sender = graph.edge_index
        h = self.before(self.embedding(graph.numbers))
        return torch.tanh(h.index_add(0, receiver, envelope(graph) * h[sender])).squeeze(1)


def wrapped(module: type[nn.Module], **options) -> blips.BayesianPotential:
    torch.manual_seed(0)
    options = {"energies_of": lambda model, graph: model(graph), "cutoff": CUTOFF, **options}
    return blips.bayesianize(Adapter(module().double(), **options))


def readout_of(potential: blips.BayesianPotential) -> dict[str, str]:
    return chosen_roles(potential.backbone, potential.conversion.roles, "readout")[0]


def slopes_of_atoms(potential: blips.BayesianPotential) -> tuple[Tensor | None, Tensor]:
    """Change of the energies of atoms by the readout: of a member, and by finite differences."""
    graph, maps = potential.backbone.graph(boxed_ammonia()), chosen(potential, "readout")
    v = normal(maps.sketch.size)
    moved = [with_linear_weights(potential, maps, v, step)(graph) for step in (1e-5, -1e-5)]
    found = LinearModel(potential.backbone, maps)(graph).members(v[None])
    of_atoms = found[keys.ENERGIES][0] if keys.ENERGIES in found else None
    return of_atoms, central(*moved, 1e-5)[keys.ENERGIES]


# ---- declared ----


@pytest.mark.parametrize("name", ["painn", "schnet"])
def test_a_declared_readout_is_taken(name: str):
    potential = small(name)
    roles, last = chosen_roles(potential.backbone, potential.conversion.roles, "readout")
    assert roles == {"readout.0": keys.NODE, "readout.2": keys.NODE}
    assert last


def test_a_readout_of_structures_and_atoms_is_declared():
    roles = readout_of(small("orb-direct"))
    assert set(roles.values()) == {"structure", keys.NODE}
    assert {name.split(".")[2] for name in roles} == {"energy", "forces", "stress"}


def test_all_maps_are_the_bayesian_ones():
    potential = small("painn")
    roles, last = chosen_roles(potential.backbone, potential.conversion.roles, "all")
    assert roles == potential.conversion.roles
    assert not last


# ---- found ----


def test_the_maps_after_the_last_exchange_are_found():
    potential = wrapped(Foreign)
    assert readout_of(potential) == {
        "model.update": keys.NODE,
        "model.readout.0": keys.NODE,
        "model.readout.2": keys.NODE,
    }
    assert {"model.before", "model.between", "model.twice"} <= potential.conversion.roles.keys()


def test_energies_of_atoms_follow_the_readout_that_was_found():
    found, expected = slopes_of_atoms(wrapped(Foreign))
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_a_map_that_runs_twice_counts_twice():
    potential = wrapped(Foreign)
    graph, maps = potential.backbone.graph(boxed_ammonia()), chosen(potential, "model.twice")
    v = normal(maps.sketch.size)
    moved = [with_linear_weights(potential, maps, v, step)(graph) for step in (1e-5, -1e-5)]
    expected = central(*moved, 1e-5)
    linearised = LinearModel(potential.backbone, maps)(graph, depth="rows")
    torch.testing.assert_close(linearised.energy_rows() @ v, expected[keys.ENERGY])
    found = linearised.members(v[None])[keys.FORCES][0]
    torch.testing.assert_close(found, expected[keys.FORCES], rtol=1e-5, atol=1e-8)


def test_a_map_before_a_linear_exchange_is_not_found():
    assert readout_of(wrapped(LinearAfterExchange)) == {"model.last": keys.NODE}


def test_energies_are_not_shared_out_to_atoms_whose_they_are_not():
    found, expected = slopes_of_atoms(wrapped(LinearAfterExchange))
    if found is not None:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_trials_leave_no_hooks_and_no_gradients():
    potential = wrapped(Foreign)
    readout_of(potential)
    assert not any(part._forward_hooks for part in potential.modules())
    assert all(parameter.grad is None for parameter in potential.parameters())


def test_a_readout_can_be_found_without_gradients_around():
    with torch.no_grad():
        assert readout_of(wrapped(Foreign))


# ---- patterns ----


@pytest.mark.parametrize(
    ("patterns", "names", "is_last"),
    [
        ("model.readout.*", ["model.readout.0", "model.readout.2"], True),
        (["*.0", "*.update"], ["model.readout.0", "model.update"], True),
        (["*.filter", "*.update"], ["model.filter", "model.update"], False),
        ("model.before", ["model.before"], False),
    ],
)
def test_patterns_choose_maps(patterns, names, is_last):
    potential = wrapped(Foreign)
    roles, last = chosen_roles(potential.backbone, potential.conversion.roles, patterns)
    assert sorted(roles) == names
    assert last == is_last


def test_patterns_reach_a_readout_that_is_not_bayesian():
    potential = small("orb")
    name = "model.heads.energy.mlp.NN-0"
    assert name not in potential.conversion.roles
    roles, last = chosen_roles(potential.backbone, potential.conversion.roles, name)
    assert roles == {name: "structure"}
    assert last


def test_patterns_that_match_nothing_name_what_there_is():
    potential = small("painn")
    with pytest.raises(InputError, match=r"no map matches 'nothing\*'.*readout\.0.*\"all\""):
        chosen_roles(potential.backbone, potential.conversion.roles, "nothing*")


# ---- no readout ----


def test_a_model_without_readout_says_so():
    with pytest.raises(ConversionError, match=r'has no readout.*maps="all"'):
        readout_of(wrapped(OnlyMessages))


def test_a_direct_model_that_declares_nothing_says_so():
    def outputs(model: Foreign, graph: AtomGraph) -> dict[str, Tensor]:
        energies = model(graph)
        forces = energies[:, None] * graph.positions
        return {keys.ENERGY: graph.sum_over_structures(energies), keys.FORCES: forces}

    with pytest.raises(ConversionError, match=r"predicts forces directly.*patterns"):
        readout_of(wrapped(Foreign, energies_of=outputs))
