import numpy as np
import pytest
import torch
from torch.testing import assert_close

from blips import keys
from blips.backbones.derivatives import energy_and_derivatives
from blips.baselines import predict_plain
from blips.config import TrainingConfig
from blips.data.dataset import StructureData
from blips.errors import InputError
from blips.train.loss import sample_crps, sample_nll
from helpers import QUICK
from studies.baselines import ShallowEnsemble
from studies.baselines.last_layer import last_layer


def test_the_mean_of_the_members_is_the_backbone(painn, structures):
    ensemble = ShallowEnsemble(painn, heads=5)
    prediction, plain = ensemble.predict(structures[0]), predict_plain(painn, structures[0])
    np.testing.assert_allclose(prediction.energy, plain.energy)
    np.testing.assert_allclose(prediction.forces, plain.forces, atol=1e-10)
    assert prediction.samples == 5


def test_each_member_is_a_potential_of_its_own(painn, graph):
    ensemble = ShallowEnsemble(painn, heads=3)
    outputs = ensemble.members(graph)
    for member in range(3):
        weight = ensemble.heads.weight[member] - ensemble.heads.weight.mean(0)
        bias = ensemble.heads.bias[member] - ensemble.heads.bias.mean()

        def energies_of(graph, weight=weight, bias=bias):
            energies, features = last_layer(painn, graph)
            return energies + 2.0 * (features @ weight + bias)  # energy scale 2 eV

        expected = energy_and_derivatives(energies_of, graph)
        for name in (keys.ENERGY, keys.ENERGIES, keys.FORCES):
            assert_close(outputs[name][member], expected[name])


def test_deviations_are_over_members(painn, graph):
    ensemble = ShallowEnsemble(painn, heads=4)
    members = ensemble.members(graph)
    prediction = ensemble.predict(graph)
    for name in (keys.ENERGY, keys.FORCES):
        std = members[name].std(dim=0, unbiased=True)
        np.testing.assert_allclose(getattr(prediction, f"{name}_std"), std)


@pytest.mark.parametrize(("loss", "score"), [("nll", sample_nll), ("crps", sample_crps)])
def test_the_loss_is_that_of_the_members_distribution(painn, structures, loss, score):
    ensemble = ShallowEnsemble(painn, heads=4, loss=loss)
    batch = StructureData(structures[0], 4.0, dtype=torch.float64).batch(range(5))
    derivatives = {"forces": True, "create_graph": True}
    terms = ensemble.loss_terms(batch, TrainingConfig(loss="mae"), derivatives)
    members = ensemble.members(batch.graph)
    assert_close(terms["forces"], score(members["forces"], batch.targets["forces"]))
    assert_close(terms["energy"], 0.1 * score(members["energy"], batch.targets["energy"]))
    sum(terms.values()).backward()
    assert all(p.grad is not None for p in ensemble.parameters())


def test_it_trains_with_crps_too(painn, structures, tmp_path):
    ensemble = ShallowEnsemble(painn, heads=4, loss="crps")
    history = ensemble.fit(
        structures[0], valid=structures[1], config={"training": QUICK}, folder=tmp_path
    ).progress.history
    assert history[-1]["valid_loss"] < history[0]["valid_loss"]


def test_errors(painn):
    with pytest.raises(InputError, match="at least 2"):
        ShallowEnsemble(painn, heads=1)
    with pytest.raises(InputError, match="unknown loss 'mae'"):
        ShallowEnsemble(painn, loss="mae")
