import pickle
import shutil

import numpy as np
import pytest
import torch

import blips.baselines as ensembles
from blips.backbones import PaiNN
from blips.baselines import DeepEnsemble, predict_plain
from blips.errors import InputError
from helpers import QUICK, TINY
from studies.nbody import EGNN, GNN, ParticleData
from studies.nbody.checks import random_particles


def untrained(count):
    models = []
    for seed in range(count):
        torch.manual_seed(seed)
        models.append(PaiNN(**TINY))
    return models


def test_mean_and_deviation_are_those_of_the_members(structures):
    models = untrained(3)
    prediction = DeepEnsemble(models).predict(structures[0], batch_size=5)
    members = [predict_plain(model, structures[0]) for model in models]
    for name in ("energy", "energies", "forces"):
        values = np.stack([getattr(member, name) for member in members])
        np.testing.assert_allclose(getattr(prediction, name), values.mean(0), atol=1e-6)
        std = values.std(axis=0, ddof=1)
        np.testing.assert_allclose(getattr(prediction, f"{name}_std"), std, atol=1e-6)
    assert prediction.samples == 3


def test_members_differ_in_seed_only_and_are_resumed_one_by_one(structures, tmp_path, monkeypatch):
    config = {"training": QUICK | {"epochs": 2}, "seed": 5}
    ensemble, results, fit = DeepEnsemble(untrained(3)), [], ensembles.fit

    def noted(*arguments, **options):
        results.append(fit(*arguments, **options))
        return results[-1]

    monkeypatch.setattr(ensembles, "fit", noted)
    result = ensemble.fit(structures[0], valid=0.25, config=config, folder=tmp_path)
    names = [path.name for path in sorted(tmp_path.iterdir())]
    assert names == ["member_0", "member_1", "member_2"]
    first, second, _ = (model.embedding.weight for model in ensemble.models)
    assert not torch.equal(first, second)
    assert result.folder == tmp_path
    held_out = [[a.positions for a in one.valid_data.structures] for one in results]
    assert len(held_out[0]) == 3
    np.testing.assert_array_equal(held_out[0], held_out[1])
    np.testing.assert_array_equal(held_out[0], held_out[2])

    stamps = [(tmp_path / name / "best.safetensors").stat().st_mtime_ns for name in names]
    shutil.rmtree(tmp_path / "member_1")
    again = DeepEnsemble(untrained(3))
    again.fit(structures[0], valid=0.25, config=config, folder=tmp_path)
    now = [(tmp_path / name / "best.safetensors").stat().st_mtime_ns for name in names]
    assert [a == b for a, b in zip(stamps, now, strict=True)] == [True, False, True]
    for ours, theirs in zip(ensemble.models, again.models, strict=True):
        assert all(torch.equal(v, theirs.state_dict()[k]) for k, v in ours.state_dict().items())


@pytest.mark.parametrize("backbone", [EGNN, GNN])
def test_particle_models(backbone, tmp_path):
    positions, velocities, charges = random_particles(0, simulations=12)
    data = ParticleData(positions, velocities, charges, positions + 0.5 * velocities)
    ensemble = DeepEnsemble([backbone(hidden=8, layers=1) for _ in range(2)])
    config = {"training": QUICK | {"loss": "mse"}}
    result = ensemble.fit(data, valid=data, config=config, folder=tmp_path)
    history = result.progress.history
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    prediction = ensemble.predict(data.batch(range(12)).graph)
    assert prediction.array("positions").shape == (60, 3)
    assert (prediction.array("positions_std") > 0).all()


def test_ensembles_pickle(structures):
    ensemble = DeepEnsemble(untrained(2))
    expected = ensemble.predict(structures[0]).energy_std
    found = pickle.loads(pickle.dumps(ensemble)).predict(structures[0]).energy_std
    np.testing.assert_array_equal(found, expected)


def test_errors():
    with pytest.raises(InputError, match="members is 1; expected 2 or more"):
        DeepEnsemble(untrained(1))
