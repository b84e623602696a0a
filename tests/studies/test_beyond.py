"""The prior beyond the data: KL on displaced copies of the training structures."""

import pytest
import torch

from blips import bayesianize
from blips.backbones import PaiNN
from blips.bayes.noise import seeded_generator
from blips.config import TrainingConfig
from blips.data.ammonia import load_ammonia
from blips.data.dataset import StructureData
from blips.train.objective import Objective
from studies.ammonia.beyond import BeyondObjective, displaced, split_settings

CUTOFF = 4.0


@pytest.fixture
def batch():
    return StructureData(load_ammonia("train")[:6], CUTOFF).batch(range(6))


def test_displaced_structures_keep_their_edges_and_stay_within_the_largest_std(batch):
    graph = batch.graph
    moved = displaced(graph, 0.3, seeded_generator("test"))
    assert torch.equal(moved.edge_index, graph.edge_index)
    distance = (moved.positions - graph.positions).square().mean().sqrt()
    assert 0.01 < float(distance) < 0.3
    again = displaced(graph, 0.3, seeded_generator("test"))
    assert torch.equal(moved.positions, again.positions)


def test_every_structure_has_a_std_of_its_own(batch):
    many = batch.graph.replicate(200)
    moved = (displaced(many, 0.5, seeded_generator("std")).positions - many.positions).double()
    std = many.sum_over_structures(moved.square().mean(1) / 4).sqrt()  # four atoms each
    assert float(std.min()) < 0.05
    assert float(std.max()) > 0.4
    # variance of a uniform scale times a normal number: 0.5^2 / 3
    assert float(moved.square().mean()) == pytest.approx(0.25 / 3, rel=0.1)


def test_the_loss_has_the_weighted_kl_of_displaced_structures(batch):
    torch.manual_seed(0)
    potential = bayesianize(PaiNN(cutoff=CUTOFF, features=8, blocks=1))
    with torch.no_grad():  # an untrained inference network gives all structures the same
        for parameter in potential.encoder.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    key = ("step", 3)
    config = TrainingConfig(noise=True, kl_weight=0.5)
    options = {"weight": 2.0, "displacement": 0.4, "num_data": 6}
    terms = BeyondObjective(potential, config, **options)(batch, key, 1.0)
    moved = displaced(batch.graph, 0.4, seeded_generator(*key, "beyond"))
    expected = potential.kl(potential.coefficients(moved))
    assert terms.parts["kl_beyond"] == pytest.approx(float(expected.detach()))
    assert terms.parts["kl_beyond"] != pytest.approx(terms.parts["kl"], rel=1e-3)
    assert float(terms.total.detach()) == pytest.approx(
        terms.parts["loss"] + 0.5 * terms.parts["kl"] + 2.0 * terms.parts["kl_beyond"]
    )
    quarter = BeyondObjective(potential, config, **options)(batch, key, 0.25)  # the KL's warm-up
    assert float(quarter.total.detach()) == pytest.approx(
        terms.parts["loss"] + 0.125 * terms.parts["kl"] + 0.5 * terms.parts["kl_beyond"]
    )
    without = Objective(potential, config, num_data=6)(batch, key, 1.0)
    assert "kl_beyond" not in without.parts
    assert without.parts["loss"] == terms.parts["loss"]


def test_settings_are_told_from_those_of_fit():
    given = {"lr": 0.1, "beyond_weight": 0.3, "beyond_displacement": 0.2}
    settings, objective = split_settings(given)
    assert settings == {"lr": 0.1}
    assert objective.keywords == {"weight": 0.3, "displacement": 0.2}
    assert split_settings({"beyond_weight": 0.0}) == ({}, None)


def test_the_posterior_learns_to_be_wide_beyond_the_data_and_narrow_on_it(batch):
    """With a data loss that wants no noise, coefficients grow with the distance from the data."""
    torch.manual_seed(0)
    potential = bayesianize(PaiNN(cutoff=CUTOFF, features=8, blocks=1), initial=0.1)
    optimizer = torch.optim.Adam(potential.encoder.parameters(), lr=5e-3)
    mean = lambda graph: torch.cat(list(potential.coefficients(graph).values())).mean()  # noqa: E731
    for step in range(150):
        moved = displaced(batch.graph, 0.5, seeded_generator("train", step))
        loss = 20.0 * mean(batch.graph) + potential.kl(potential.coefficients(moved))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    on_data = float(mean(batch.graph).detach())
    far = displaced(batch.graph.replicate(20), 0.5, seeded_generator("test"))
    assert float(mean(far).detach()) > 3.0 * on_data
