"""What a training step and a validation compute, against the same from public parts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator

from blips import bayesianize
from blips.backbones import PaiNN
from blips.bayes.noise import seeded_generator
from blips.config import TrainingConfig
from blips.data.ammonia import load_ammonia
from blips.data.dataset import StructureData
from blips.errors import ConfigError
from blips.train.loss import data_loss
from blips.train.objective import Objective

CUTOFF = 4.0
KEY = ("step", 0)


@pytest.fixture
def batch():
    return StructureData(load_ammonia("train")[:6], CUTOFF).batch(range(6))


@pytest.fixture
def potential():
    torch.manual_seed(0)
    return bayesianize(PaiNN(cutoff=CUTOFF, features=8, blocks=1), initial=0.5)


def loss_of(outputs, batch, count, config) -> float:
    by_sample = {n: outputs[n].reshape(count, *y.shape) for n, y in batch.targets.items()}
    terms = data_loss(by_sample, batch.targets, batch.graph.node_counts(), config)
    return float(sum(terms.values()))


@pytest.mark.parametrize(("loss", "samples", "count"), [("mae", 5, 1), ("crps", 3, 3)])
def test_point_losses_take_one_sample_and_distribution_losses_all(
    batch, potential, loss, samples, count
):
    config = TrainingConfig(noise=True, loss=loss, samples=samples)
    generators = [seeded_generator(*KEY, k) for k in range(count)]
    expected = potential.sample(batch.graph, generators, forces=True)
    found = Objective(potential, config, 6)(batch, KEY, 1.0)
    assert found.parts["loss"] == pytest.approx(loss_of(expected.outputs, batch, count, config))


def test_without_noise_the_loss_is_that_of_the_mean(batch, potential):
    config = TrainingConfig(noise=False, loss="mae")
    expected = loss_of(potential(batch.graph, forces=True), batch, 1, config)
    assert Objective(potential, config, 6)(batch, KEY, 1.0).parts["loss"] == pytest.approx(expected)


@pytest.mark.parametrize(("samples", "count"), [(2, 8), (10, 10)])
def test_validation_of_a_distribution_has_eight_samples_or_more(batch, potential, samples, count):
    config = TrainingConfig(noise=True, loss="crps", samples=samples)
    generators = [seeded_generator("valid", 3, k) for k in range(count)]
    expected = potential.sample(batch.graph, generators, forces=True).outputs
    found = Objective(potential, config, 6).evaluate(batch, seed=3)
    assert found["loss"] == pytest.approx(loss_of(expected, batch, count, config))
    mean = expected["forces"].reshape(count, -1, 3).mean(0)
    mae = 1000 * float((mean - batch.targets["forces"]).abs().mean())
    assert found["mae_forces"] == pytest.approx(mae, rel=1e-5)


def test_a_small_weight_of_stress_counts():
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=0)
    atoms.calc = EMT()
    results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
    atoms.calc = SinglePointCalculator(atoms, **results, stress=np.linspace(0.01, 0.06, 6))
    quantities = ("energy", "forces", "stress")
    batch = StructureData([atoms], CUTOFF, quantities=quantities).batch([0])
    torch.manual_seed(0)
    model = PaiNN(cutoff=CUTOFF, features=8, blocks=1)
    one, half = (
        Objective(model, TrainingConfig(loss="mae", weights={"stress": w}), 1)(batch, KEY, 1.0)
        for w in (1.0, 0.5)
    )
    assert half.parts["stress"] == pytest.approx(0.5 * one.parts["stress"])
    assert half.parts["stress"] > 0


def test_a_weight_of_stress_asks_for_none_where_there_is_no_label(batch, potential):
    """Molecules have no stress at all."""
    weighted = TrainingConfig(loss="mae", weights={"stress": 1.0})
    found = Objective(potential, weighted, 6)(batch, KEY, 1.0).parts
    assert found == Objective(potential, TrainingConfig(loss="mae"), 6)(batch, KEY, 1.0).parts
    assert "stress" not in found


def test_the_kl_warms_up(batch, potential):
    found = Objective(potential, TrainingConfig(noise=True, kl_weight=0.5), 6)(batch, KEY, 0.25)
    expected = found.parts["loss"] + 0.25 * 0.5 * found.parts["kl"]
    assert float(found.total.detach()) == pytest.approx(expected)


def test_forces_are_asked_for_where_they_have_labels_and_a_weight(batch, potential):
    unlabelled = replace(batch, targets={"energy": batch.targets["energy"]})
    for given, weight, wanted in (
        (batch, 1.0, True),
        (batch, 0.0, False),
        (unlabelled, 1.0, False),
    ):
        config = TrainingConfig(loss="mae", weights={"forces": weight})
        found = Objective(potential, config, 6).derivatives(given, create_graph=False)
        assert (found["forces"], found["stress"], found["create_graph"]) == (wanted, False, False)


def test_labels_without_weight_are_left_out(batch, potential):
    """Also those that the model is then not asked for."""
    stress = {**batch.targets, "stress": torch.zeros(batch.graph.num_structures, 3, 3)}
    labelled = replace(batch, targets=stress)
    for weights, left in (({"energy": 0.5, "forces": 0}, "energy"), ({"energy": 0}, "forces")):
        objective = Objective(potential, TrainingConfig(weights=weights), 6)
        parts = objective(labelled, KEY, 1.0).parts
        assert parts.keys() == {left, "loss"}
        assert left in objective.evaluate(labelled)


def test_nothing_to_train_on_is_said(batch, potential):
    config = TrainingConfig(weights={"energy": 0, "forces": 0})
    with pytest.raises(ConfigError, match="nothing to train on: the data have energy, forces"):
        Objective(potential, config, 6)(batch, KEY, 1.0)
