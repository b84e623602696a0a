import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from blips.bayes.noise import generators
from blips.errors import ConversionError, InputError, TooLargeError
from blips.testing import rotation_matrix
from helpers import QUICK
from studies.baselines import MCDropout
from studies.baselines.dropout import Masks
from studies.nbody import EGNN, GNN, ParticleData, ParticleGraph
from studies.nbody.checks import random_particles

EXACT = {"rtol": 0.0, "atol": 1e-10}
LITTLE_GB = 3e-4  # for one sample of the graph, not for many


@given(rate=st.floats(0.01, 0.9), samples=st.integers(1, 3))
def test_masks_keep_the_mean_and_the_rate(rate, samples):
    z = torch.ones(samples * 400, 50, dtype=torch.float64)
    dropped = Masks(rate, generators(0, samples)).apply(z)
    kept = dropped != 0
    assert_close(dropped[kept], torch.full_like(dropped[kept], 1.0 / (1.0 - rate)))
    tolerance = 5.0 * (rate * (1.0 - rate) / z.numel()) ** 0.5
    assert abs(float(kept.double().mean()) - (1.0 - rate)) < tolerance


def test_one_mask_for_all_components_of_a_vector():
    vectors = torch.randn(40, 3, 8, generator=torch.Generator().manual_seed(0))
    kept = Masks(0.5, generators(0, 2)).apply(vectors) != 0
    assert (kept == kept[:, :1]).all()
    assert 0.3 < kept.double().mean() < 0.7
    assert not torch.equal(kept[:20], kept[20:])


def test_without_noise_it_is_the_plain_model(painn, graph):
    plain = copy.deepcopy(painn)(graph)["energies"]
    dropout = MCDropout(painn)
    assert torch.equal(dropout(graph)["energies"], plain)
    dropout.sample(graph, generators(0, 2))
    assert torch.equal(dropout(graph)["energies"], plain)
    assert torch.equal(painn(graph)["energies"], plain)


def test_messages_and_updates_have_dropout_but_no_output(painn):
    maps = MCDropout(painn).maps
    assert {"blocks.0.message.filter", "blocks.1.update.mixing"} <= set(maps)
    assert {"blocks.0.message.sender.2", "blocks.1.update.gates.0"} <= set(maps)
    assert not any(name.startswith(("readout", "embedding")) for name in maps)
    particle_maps = MCDropout(EGNN(hidden=8, layers=2)).maps
    assert "layers.0.coordinate.0" in particle_maps
    assert "layers.0.coordinate.2" not in particle_maps
    assert "layers.1.velocity.2" not in particle_maps


def test_samples_are_functions_of_their_generator_alone(painn, graph):
    dropout = MCDropout(painn, rate=0.3)
    together = dropout.sample(graph, generators(7, 3)).outputs["forces"].reshape(3, -1, 3)
    for k in range(3):
        alone = dropout.sample(graph, generators(7, 1, first=k)).outputs["forces"]
        assert_close(together[k], alone, **EXACT)
    assert not torch.allclose(together[0], together[1])
    with pytest.raises(TooLargeError, match="GB for one pass"):
        dropout.predict(graph, samples=6, memory_gb=1e-9)
    small = dropout.predict(graph, samples=6, memory_gb=LITTLE_GB)
    large = dropout.predict(graph, samples=6)
    assert small.details["chunk"] == 1 < large.details["chunk"]
    np.testing.assert_allclose(small.forces_std, large.forces_std, **EXACT)
    other = dropout.predict(graph, samples=6, seed=1)
    assert not np.allclose(other.forces_std, large.forces_std)


def test_a_sample_of_an_equivariant_potential_is_equivariant(painn, graph):
    dropout = MCDropout(painn, rate=0.3)
    turn = torch.as_tensor(rotation_matrix())
    turned = replace(graph, positions=graph.positions @ turn.T)
    here = dropout.sample(graph, generators(0, 2)).outputs
    there = dropout.sample(turned, generators(0, 2)).outputs
    assert_close(there["energies"], here["energies"], **EXACT)
    assert_close(there["forces"], here["forces"] @ turn.T, **EXACT)


def test_forces_are_the_gradient_of_the_sampled_energy(painn, graph):
    dropout = MCDropout(painn, rate=0.3)
    forces = dropout.sample(graph, generators(0, 1)).outputs["forces"]
    step = torch.zeros_like(graph.positions)
    step[1, 2] = 1e-5
    energies = [
        dropout.sample(replace(graph, positions=graph.positions + s), generators(0, 1)).outputs[
            "energy"
        ]
        for s in (step, -step)
    ]
    slope = (energies[0] - energies[1])[0] / 2e-5
    assert float(-slope) == pytest.approx(float(forces[1, 2]), abs=1e-7)


def test_a_sample_of_egnn_is_equivariant():
    positions, velocities, charges = random_particles(0)
    torch.manual_seed(0)
    dropout = MCDropout(EGNN(hidden=8, layers=2).double(), rate=0.3)
    turn = torch.as_tensor(rotation_matrix())
    arrays = (positions, velocities, charges), (positions @ turn.T, velocities @ turn.T, charges)
    here, there = (
        dropout.sample(ParticleGraph.from_arrays(*a), generators(0, 2)).outputs["positions"]
        for a in arrays
    )
    assert_close(there, here @ turn.T, **EXACT)


def test_particle_models_train_and_predict(tmp_path):
    positions, velocities, charges = random_particles(0, simulations=12)
    data = ParticleData(positions, velocities, charges, positions + 0.5 * velocities)
    torch.manual_seed(0)
    dropout = MCDropout(GNN(hidden=8, layers=2), rate=0.05)
    config = {"training": QUICK | {"loss": "crps", "samples": 3}}
    history = dropout.fit(data, valid=data, config=config, folder=tmp_path).progress.history
    assert history[-1]["valid_loss"] < history[0]["valid_loss"]
    prediction = dropout.predict(data.batch(range(12)).graph, samples=4)
    assert (prediction.array("positions_std") > 0).any()


def test_errors(painn):
    for rate in (0.0, 1.0, -0.1):
        with pytest.raises(InputError, match="between 0 and 1"):
            MCDropout(painn, rate)
    with pytest.raises(ConversionError, match="no map for dropout"):
        MCDropout(painn, exclude="*")
    MCDropout(painn)
    with pytest.raises(ConversionError, match="has dropout already"):
        MCDropout(painn)
