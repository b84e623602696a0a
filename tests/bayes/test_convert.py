import pytest
import torch
from torch import nn

from blips.bayes.convert import convert, probe_roles, revert
from blips.bayes.linear import StochasticMap
from blips.errors import ConversionError


class Toy(nn.Module):
    """Maps on 5 edges, 3 nodes and 2 structures; one that is never called; one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 6)
        self.message = nn.Sequential(nn.Linear(6, 6), nn.SiLU(), nn.Linear(6, 6))
        self.update = nn.Linear(6, 6)
        self.readout = nn.Linear(6, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self) -> torch.Tensor:
        nodes = self.embed(torch.tensor([0, 1, 2]))
        edges = self.message(nodes[torch.tensor([0, 1, 2, 0, 1])])
        nodes = self.update(nodes).index_add(0, torch.tensor([1, 2, 0, 2, 0]), edges)
        return self.readout(nodes[:2])


ROLES = {"message.*": "edge", "update": "node", "readout": "node"}
COUNTS = {"edge": 5, "node": 3, "structure": 2}


def test_every_module_with_parameters_is_reported():
    toy = Toy()
    report = convert(toy, ROLES, exclude={"readout": "excluded"})
    assert report.roles == {"message.0": "edge", "message.2": "edge", "update": "node"}
    reasons = {m.name: m.reason for m in report.maps if not m.role}
    assert reasons == {
        "embed": "Embedding is not known as a linear map",
        "readout": "excluded",
        "unused": "the backbone declares no row type for it",
    }
    assert sum(m.parameters for m in report.maps) == sum(p.numel() for p in toy.parameters())
    assert "3 of 6 modules Bayesian" in str(report)
    assert "message.0" in str(report)


def test_convert_then_revert_is_the_identity():
    toy = Toy()
    before, state = toy(), {k: v.clone() for k, v in toy.state_dict().items()}
    convert(toy, ROLES)
    assert torch.equal(toy(), before)
    assert toy.state_dict().keys() == state.keys()
    revert(toy)
    assert not any(isinstance(m, StochasticMap) for m in toy.modules())
    assert all(torch.equal(v, state[k]) for k, v in toy.state_dict().items())
    assert torch.equal(toy(), before)


def test_maps_by_pattern():
    assert set(convert(Toy(), ROLES, maps="message.*").roles) == {"message.0", "message.2"}
    chosen = convert(Toy(), ROLES, maps=["message.0", "readout"], exclude={"message.*": "no"})
    assert set(chosen.roles) == {"readout"}


def test_zero_matches_is_an_error_that_shows_the_report():
    with pytest.raises(ConversionError, match=r"nothing would be Bayesian[\s\S]*not selected by"):
        convert(Toy(), ROLES, maps="encoder.*")


def test_converting_twice_is_refused():
    toy = Toy()
    convert(toy, ROLES)
    with pytest.raises(ConversionError, match="Bayesian already"):
        convert(toy, ROLES)


def test_probing_finds_row_types_and_says_why_not():
    toy = Toy()
    roles, reasons = probe_roles(toy, toy, COUNTS)
    assert roles == {
        "message.0": "edge",
        "message.2": "edge",
        "update": "node",
        "readout": "structure",
    }
    assert reasons == {"unused": "not called on the probe graph"}
    assert all(not m._forward_pre_hooks for m in toy.modules())


def test_probing_needs_distinct_counts():
    toy = Toy()
    with pytest.raises(ConversionError, match="cannot be told apart"):
        probe_roles(toy, toy, {"edge": 5, "node": 5})
