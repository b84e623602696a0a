"""What all baselines have in common, each trained once."""

import copy
import subprocess
import sys
from functools import partial

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.fd import calculate_numerical_stress
from typer.testing import CliRunner

import blips
from blips.backbones import PaiNN, SchNet
from blips.baselines import Baseline, DeepEnsemble, predict_plain
from blips.cli import app
from blips.errors import CheckpointError, ConfigError, InputError
from blips.train.objective import Wrapper
from blips.uq.assess import References, assess, calibrate, write_figures
from helpers import QUICK, TINY, morse_ammonia
from studies.baselines import (
    EmbeddingMixture,
    Evidential,
    LastLayerRigidity,
    MCDropout,
    MeanVariance,
    ShallowEnsemble,
)
from studies.nbody import EGNN


def painn(seed: int = 0) -> PaiNN:
    torch.manual_seed(seed)
    return PaiNN(**TINY)


MAKE = {
    "ensemble": lambda: DeepEnsemble([painn(seed) for seed in range(2)]),
    "dropout": lambda: MCDropout(painn(), rate=0.1),
    "shallow": lambda: ShallowEnsemble(painn(), heads=4, loss="nll"),
    "llpr": lambda: LastLayerRigidity(painn()),
    "gmm": lambda: EmbeddingMixture(painn()),
    "mean_variance": lambda: MeanVariance(painn()),
    "evidential": lambda: Evidential(painn()),
}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, structures):
    """name -> (trained baseline, result)."""
    known: dict = {}

    def get(name: str):
        if name not in known:
            baseline = MAKE[name]()
            result = baseline.fit(
                structures[0],
                valid=structures[1],
                config={"training": QUICK},
                folder=tmp_path_factory.mktemp(name),
            )
            known[name] = baseline, result
        return known[name]

    return get


@pytest.mark.parametrize("name", MAKE)
def test_fit_reduces_the_loss_and_its_predictions_can_be_assessed(name, fitted):
    baseline, result = fitted(name)
    assert isinstance(baseline, Baseline)
    assert result.progress.history[-1]["train_loss"] < result.progress.history[0]["train_loss"]
    test = morse_ammonia(5, seed=2)
    prediction = baseline.predict(test, batch_size=3)
    assert prediction.method == name
    assert prediction.energy.shape == (5,)
    assert prediction.forces_total_std.shape == prediction.forces.shape == (20, 3)
    assert (prediction.forces_total_std > 0).all()
    assert (prediction.energy_total_std > 0).all()
    evaluation = assess(prediction, References.of(test), n_bootstrap=20)
    assert {"mae", "nll", "ece"} <= evaluation.forces.keys()
    assert {"mae", "nll", "ece"} <= evaluation.energy.keys()


@pytest.mark.parametrize("name", ["ensemble", "llpr", "shallow"])
def test_fit_takes_the_options_of_blips_fit(name, structures, tmp_path):
    train, valid = structures
    result = MAKE[name]().fit(train, valid=valid, folder=tmp_path, epochs=1, tensorboard=False)
    assert len(result.progress.history) == 1
    with pytest.raises(ConfigError, match="epoch"):
        MAKE[name]().fit(train, valid=valid, folder=tmp_path / "other", epoch=1)


@pytest.mark.parametrize("name", MAKE)
def test_the_same_seed_gives_the_same_prediction(name, fitted, structures):
    baseline, _ = fitted(name)
    first, second = (baseline.predict(structures[1], seed=3) for _ in range(2))
    np.testing.assert_array_equal(first.forces, second.forces)
    np.testing.assert_array_equal(first.forces_total_std, second.forces_total_std)


@pytest.mark.parametrize("name", MAKE)
def test_recalibration_makes_the_mean_squared_z_one(name, fitted, structures):
    baseline = copy.copy(fitted(name)[0])
    baseline.calibration = {}
    calibrate(baseline, structures[1])
    prediction, references = baseline.predict(structures[1]), References.of(structures[1])
    z = (references.forces - prediction.forces) / prediction.forces_total_std
    assert np.mean(z**2) == pytest.approx(1.0)
    assert prediction.details["calibrated"] == ("energy", "forces")
    assert "calibrated" not in baseline.predict(structures[1], calibrated=False).details


def test_figures_compare_baselines(fitted, structures, tmp_path):
    names = ("ensemble", "evidential")
    predictions = {name: fitted(name)[0].predict(structures[1]) for name in names}
    paths = write_figures(tmp_path, predictions, References.of(structures[1]))
    assert all(path.stat().st_size > 0 for path in paths)


@pytest.mark.parametrize("name", MAKE)
def test_saved_and_loaded_they_predict_the_same(name, fitted, structures, tmp_path):
    ours, _ = fitted(name)
    theirs = blips.load(blips.save(ours, tmp_path / "model.safetensors"))
    assert type(theirs) is type(ours)
    first, second = (m.predict(structures[1], seed=1) for m in (ours, theirs))
    np.testing.assert_array_equal(first.forces, second.forces)
    np.testing.assert_array_equal(first.energy_total_std, second.energy_total_std)


def test_a_fresh_process_loads_baselines_without_importing_them(fitted, tmp_path):
    path = blips.save(fitted("ensemble")[0], tmp_path / "model.safetensors")
    code = f"import blips; print(type(blips.load({str(path)!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "DeepEnsemble"


def test_a_checkpoint_of_an_unknown_kind_says_so(fitted, tmp_path, monkeypatch):
    path = blips.save(fitted("dropout")[0], tmp_path / "model.safetensors")
    monkeypatch.delitem(Wrapper.kinds, "dropout")
    with pytest.raises(CheckpointError, match="unknown kind 'dropout'"):
        blips.load(path)


def test_an_ensemble_of_different_models_is_not_saved(tmp_path):
    ensemble = DeepEnsemble([painn(), PaiNN(**TINY | {"features": 4})])
    with pytest.raises(InputError, match="save each"):
        blips.save(ensemble, tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", MAKE)
def test_they_drive_ase_as_potentials_do(name, fitted, structures):
    baseline, _ = fitted(name)
    atoms = structures[1][0].copy()
    expected = baseline.predict(atoms, samples=4, seed=2)
    atoms.calc = blips.Calculator(baseline, samples=4, seed=2)
    np.testing.assert_array_equal(atoms.get_forces(), expected.forces)
    found = atoms.calc.get_property("forces_uncertainty", atoms)
    np.testing.assert_array_equal(found, expected.forces_total_std)
    atoms.calc = blips.Calculator(baseline, "map", samples=4, seed=2, every=10)
    mean = baseline.predict(atoms, method="map")
    assert mean.forces_total_std is None
    np.testing.assert_array_equal(atoms.get_forces(), mean.forces)
    found = atoms.calc.get_property("forces_uncertainty", atoms)
    np.testing.assert_array_equal(found, expected.forces_total_std)
    with pytest.raises(InputError, match="unknown method 'frozen'"):
        blips.Calculator(baseline, "frozen")


@pytest.mark.parametrize("name", MAKE)
def test_the_stress_is_the_derivative_of_the_energy(name, fitted):
    baseline, _ = fitted(name)
    atoms = bulk("N", "sc", a=2.2) * (2, 1, 1)
    atoms.rattle(0.1, seed=0)
    atoms.calc = blips.Calculator(baseline, "map")
    expected = calculate_numerical_stress(atoms, eps=1e-3)
    np.testing.assert_allclose(atoms.get_stress(), expected, atol=2e-3)
    assert baseline.predict(atoms, stress=True, samples=2).stress.shape == (1, 3, 3)
    assert baseline.predict(atoms, forces=False, samples=2).forces is None


@pytest.mark.parametrize("name", ["ensemble", "llpr"])
def test_commands_take_them(name, fitted, structures, tmp_path):
    model = blips.save(fitted(name)[0], tmp_path / "model.safetensors")
    ase.io.write(tmp_path / "test.extxyz", structures[1])
    run = partial(CliRunner().invoke, app, catch_exceptions=False)
    predicted = tmp_path / "predicted.extxyz"
    assert (
        run(["predict", str(model), str(tmp_path / "test.extxyz"), "-o", str(predicted)]).exit_code
        == 0
    )
    expected = fitted(name)[0].predict(structures[1][0]).forces_total_std
    found = ase.io.read(predicted, "0").arrays["forces_uncertainty"]
    np.testing.assert_allclose(found, expected, rtol=1e-4)  # float32, positions of 8 digits
    folder = str(tmp_path / "evaluation")
    arguments = ["evaluate", str(model), str(tmp_path / "test.extxyz"), "--bootstrap", "5"]
    done = run([*arguments, "--folder", folder])
    assert done.exit_code == 0
    assert "spearman_given_force" in (tmp_path / "evaluation" / "metrics.json").read_text()
    arguments = ["md", str(model), str(tmp_path / "test.extxyz"), "--steps", "2", "--every", "1"]
    done = run([*arguments, "--folder", str(tmp_path / "md"), "--high", "100"])
    assert done.exit_code == 0
    assert "2 steps done" in done.stdout


@pytest.mark.parametrize("name", ["llpr", "evidential"])
def test_a_finished_run_is_read_again_not_repeated(name, fitted, structures):
    ours, result = fitted(name)
    again = MAKE[name]()
    repeated = again.fit(
        structures[0], valid=structures[1], config={"training": QUICK}, folder=result.folder
    )
    assert repeated.progress.history == result.progress.history
    np.testing.assert_array_equal(
        again.predict(structures[1]).forces_total_std, ours.predict(structures[1]).forces_total_std
    )


@pytest.mark.parametrize("name", ["llpr", "gmm"])
def test_a_trained_model_needs_only_be_conditioned(name, fitted, structures):
    trained, result = fitted(name)
    other = type(trained)(trained.backbone)
    with pytest.raises(InputError, match="call fit or condition first"):
        other.predict(structures[1])
    other.condition(result.train_data, result.valid_data)
    np.testing.assert_array_equal(
        other.predict(structures[1]).energy_std, trained.predict(structures[1]).energy_std
    )


@pytest.mark.parametrize("name", ["mean_variance", "evidential", "shallow"])
def test_stress_labels_are_refused_not_ignored(name, fitted, structures, tmp_path):
    atoms = structures[0][0].copy()
    atoms.calc = structures[0][0].calc
    atoms.cell, atoms.pbc = [9, 9, 9], True
    atoms.calc.atoms = None
    atoms.info["stress"] = np.eye(3)
    config = {"training": QUICK | {"weights": {"stress": 1.0}}}
    with pytest.raises(ConfigError, match=r"training\.weights\.stress=0"):
        MAKE[name]().fit([atoms], valid=[atoms], config=config, folder=tmp_path)


@pytest.mark.parametrize("make", [MeanVariance, Evidential, ShallowEnsemble, LastLayerRigidity])
def test_methods_on_the_readout_take_schnet_but_no_particle_model(make, structures):
    torch.manual_seed(0)
    make(SchNet(**TINY))
    with pytest.raises(InputError, match="has no `readout` network"):
        make(EGNN(hidden=8, layers=1))


def test_plain_predictions_are_those_of_the_backbone(structures):
    backbone = painn()
    prediction = predict_plain(backbone, structures[0], batch_size=5)
    assert prediction.method == "plain"
    assert prediction.forces_total_std is None
    whole = backbone(backbone.graph(structures[0]))["energies"].detach().reshape(-1, 4).sum(1)
    np.testing.assert_allclose(prediction.energy, whole, rtol=0, atol=1e-6)
    with pytest.raises(InputError, match="takes graphs"):
        predict_plain(EGNN(hidden=8, layers=1), structures[0])


@pytest.mark.parametrize("name", ["llpr", "gmm", "shallow", "dropout"])
def test_an_isolated_atom_has_no_force_and_no_trouble(name, fitted):
    prediction = fitted(name)[0].predict(Atoms("N"))
    np.testing.assert_array_equal(prediction.forces, 0.0)
    assert np.isfinite(prediction.energy_std).all()
