import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
import yaml
from ase.calculators.singlepoint import SinglePointCalculator

import blips
from blips.backbones import PaiNN
from blips.config import TrainingConfig, load_config
from blips.data.dataset import StructureData
from blips.data.labels import Labels
from blips.data.splits import Split
from blips.errors import ConfigError, InputError
from blips.train.checkpoint import read_tensors
from blips.train.loop import NonFiniteLossError, Trainer, default_batch_size
from blips.train.objective import Objective
from blips.train.run import RunFolder, environment
from blips.units import KCAL_PER_MOL
from blips.uq.calibrate import ScaleCalibrator
from studies.nbody import EGNN, ParticleData

TINY = {"cutoff": 4.0, "features": 8, "blocks": 1, "num_basis": 4}
QUICK = {
    "epochs": 4,
    "batch_size": 5,
    "noise": True,
    "condition": False,
    "schedule": {"kind": "constant"},
    "kl_weight": 0.1,
    "tensorboard": False,
    "threads": 1,
}


def potential(seed: int = 0) -> blips.BayesianPotential:
    torch.manual_seed(seed)
    return blips.bayesianize(PaiNN(**TINY), seed=seed)


def fit(model, structures, folder, **training):
    train, valid = structures
    config = {"training": QUICK | training}
    return blips.fit(model, train, valid=valid, config=config, folder=folder, display=False)


def test_training_reduces_the_loss_and_leaves_a_complete_folder(tmp_path, structures):
    result = fit(potential(), structures, tmp_path, epochs=30, lr=5e-3, tensorboard=True)
    history = result.progress.history
    assert history[-1]["train_loss"] < 0.8 * history[0]["train_loss"]
    assert result.progress.best_loss < 0.9 * history[0]["valid_loss"]
    names = {path.name for path in tmp_path.iterdir()}
    expected = {"config.yaml", "environment.json", "metrics.csv", "tensorboard"}
    assert names == expected | {"last.safetensors", "best.safetensors"}
    assert any((tmp_path / "tensorboard").iterdir())
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(float(row["epoch"])) for row in rows] == list(range(1, 31))
    assert {"train_kl", "train_coef_edge", "train_coef_node", "valid_loss", "lr"} <= set(rows[0])
    resolved = load_config(tmp_path / "config.yaml")
    assert resolved.training.epochs == 30


def test_the_record_of_a_command_does_not_say_whose_machine_it_was(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    given = ["/home/someone/bin/blips", "train", "--data=/home/someone/a.xyz", "/data/b.xyz"]
    monkeypatch.setattr(sys, "argv", given)
    assert environment()["command"] == ["blips", "train", "--data=~/a.xyz", "/data/b.xyz"]


def test_the_model_ends_with_its_best_weights(tmp_path, structures):
    model = potential()
    fit(model, structures, tmp_path, epochs=6, lr=0.1)
    best, _ = read_tensors(tmp_path / "best.safetensors")
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in best.items())


OPTIONS = {
    "plain": {},
    "plateau": {"schedule": {"kind": "plateau", "patience": 0}, "lr": 0.05},
    "cosine_ema_clip": {
        "schedule": {"kind": "cosine", "warmup": 0.3},
        "ema_decay": 0.9,
        "clip_norm": 0.5,
        "optimizer": "adamw",
        "weight_decay": 0.01,
        "encoder_lr": 1e-4,
        "kl_warmup_epochs": 3,
    },
    "crps": {"loss": "crps", "samples": 3},
    "nll": {"loss": "nll", "samples": 3},
    "huber": {"loss": "conditional_huber"},
    "elbo": {"kl_reduction": "elbo", "kl_weight": 1e-3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_resumed_equals_uninterrupted_bitwise(tmp_path, structures, options):
    fit(potential(), structures, tmp_path / "whole", **options)
    total = QUICK["epochs"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "blips.train.loop.Trainer._should_stop", lambda self: self.progress.epoch == 2
        )
        fit(potential(), structures, tmp_path / "parts", **options)
    train, valid = structures
    resumed = blips.fit(
        potential(),
        train,
        valid=valid,
        config={"training": QUICK | options},
        folder=tmp_path / "parts",
        resume=True,
        display=False,
    )
    assert resumed.progress.epoch == total
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def assert_same_run(first: Path, second: Path) -> None:
    for name in ("last.safetensors", "best.safetensors"):
        ours, theirs = read_tensors(first / name)[0], read_tensors(second / name)[0]
        assert ours.keys() == theirs.keys()
        different = [key for key in ours if not torch.equal(ours[key], theirs[key])]
        assert not different
    assert (first / "metrics.csv").read_text() == (second / "metrics.csv").read_text()


def test_a_resumed_average_stays_on_the_device_of_the_model(tmp_path, structures):
    """As on a GPU, where the file's tensors would not do: they are copied into those in use."""
    fit(potential(), structures, tmp_path, ema_decay=0.9)
    data = [StructureData(part, TINY["cutoff"]) for part in structures]
    settings = load_config(tmp_path / "config.yaml")
    trainer = Trainer(potential(), *data, settings, RunFolder(tmp_path))
    before = dict(trainer.average.values)
    trainer.resume()
    assert trainer.progress.epoch == QUICK["epochs"]
    saved = read_tensors(tmp_path / "last.safetensors")[0]
    for name, value in trainer.average.values.items():
        assert value is before[name]
        assert torch.equal(value, saved[f"average.{name}"])


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_like_an_undisturbed_one(tmp_path, structures):
    import ase.io

    train, valid = structures
    ase.io.write(tmp_path / "train.extxyz", train)
    ase.io.write(tmp_path / "valid.extxyz", valid)
    config = {
        "model": {"hyperparameters": TINY},
        "data": {"train": str(tmp_path / "train.extxyz"), "valid": str(tmp_path / "valid.extxyz")},
        "training": QUICK | {"epochs": 40},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    def command(folder: str) -> list[str]:
        program = "import sys; from blips.cli import main; main()"
        arguments = ["train", str(tmp_path / "config.yaml"), f"folder={tmp_path / folder}"]
        return [sys.executable, "-c", program, *arguments, "--resume"]

    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command("whole"), check=True, capture_output=True, env=variables)
    rng, kills = random.Random(0), 0
    for _ in range(60):
        process = subprocess.Popen(
            command("killed"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=variables,
        )
        state = tmp_path / "killed" / "last.safetensors"
        stamp = state.stat().st_mtime_ns if state.exists() else None
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if (state.stat().st_mtime_ns if state.exists() else None) != stamp:
                break  # it is past the imports and writes epochs
            time.sleep(0.02)
        if kills == 4 or process.poll() is not None:
            assert process.wait(120) == 0
            break
        time.sleep(rng.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        kills += process.wait(10) == -signal.SIGKILL
    assert kills >= 2
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_non_finite_losses_stop_and_name_the_structures(tmp_path, structures):
    train, valid = structures
    bad = [atoms.copy() for atoms in train]
    for atoms, labelled in zip(bad, train, strict=True):
        atoms.calc = labelled.calc
    model = potential()
    with torch.no_grad():
        model.backbone.embedding.weight[1] = 1e38
    with pytest.raises(NonFiniteLossError, match=r"epoch 1 on: training structures, frame \d+"):
        fit(model, (bad, valid), tmp_path)


def test_a_folder_in_use_and_changed_settings_are_refused(tmp_path, structures):
    fit(potential(), structures, tmp_path)
    with pytest.raises(ConfigError, match="holds a run already"):
        fit(potential(), structures, tmp_path)
    train, valid = structures
    with pytest.raises(ConfigError, match=r"training\.lr differ"):
        blips.fit(
            potential(),
            train,
            valid=valid,
            config={"training": QUICK | {"lr": 0.5}},
            folder=tmp_path,
            resume=True,
        )


@pytest.mark.parametrize(
    ("structures", "size"), [(1, 2), (100, 2), (149, 2), (150, 3), (399, 7), (400, 8), (100_000, 8)]
)
def test_an_epoch_has_fifty_steps_where_structures_suffice(structures, size):
    assert default_batch_size(structures) == size


def test_few_structures_are_trained_on_in_pairs(tmp_path, structures):
    ends = []
    for size in (None, 2, 4):
        model = potential()
        fit(model, structures, tmp_path / str(size), epochs=1, batch_size=size, noise=False)
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(ends[0], ends[1])
    assert not torch.allclose(ends[0], ends[2], rtol=1e-4)


def test_early_stop_and_splits(tmp_path, structures):
    config = {"training": QUICK | {"epochs": 50, "early_stop_patience": 2, "lr": 1.0}, "seed": 3}
    result = blips.fit(
        potential(), structures[0], valid=0.25, config=config, folder=tmp_path, display=False
    )
    assert result.progress.epoch < 50
    assert result.progress.epoch - result.progress.best_epoch == 2
    assert (tmp_path / "split.json").exists()


def test_a_plain_backbone_trains_with_the_same_verb(tmp_path, structures):
    torch.manual_seed(0)
    result = fit(PaiNN(**TINY), structures, tmp_path, epochs=10, lr=5e-3)
    assert "train_kl" not in result.progress.history[0]
    assert result.progress.history[-1]["train_loss"] < result.progress.history[0]["train_loss"]


def test_particle_models_train_on_data_sets(tmp_path):
    rng = np.random.default_rng(0)
    x, v = rng.normal(size=(2, 20, 5, 3))
    q = rng.choice([-1.0, 1.0], size=(20, 5))
    data = ParticleData(x, v, q, x + 0.5 * v)
    torch.manual_seed(0)
    model = blips.bayesianize(EGNN(hidden=8, layers=2))
    config = {"training": QUICK | {"epochs": 15, "loss": "mse", "kl_weight": 0.01, "lr": 5e-3}}
    result = blips.fit(model, data, valid=data, config=config, folder=tmp_path, display=False)
    assert result.progress.best_loss < 0.5 * result.progress.history[0]["valid_loss"]
    with pytest.raises(InputError, match="data sets, not ASE structures"):
        blips.fit(model, [], valid=[], config=config, folder=tmp_path / "b", display=False)


def encoder_weights(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.encoder.parameters()]


def test_the_kl_warms_up_in_proportion_to_the_epoch(tmp_path, structures):
    """In epoch 1 of 4 the weight 0.4 counts as 0.1."""
    found = []
    for name, options in {
        "warm": {"kl_weight": 0.4, "kl_warmup_epochs": 4},
        "quarter": {"kl_weight": 0.1},
        "whole": {"kl_weight": 0.4},
    }.items():
        model = potential()
        fit(model, structures, tmp_path / name, epochs=1, **options)
        found.append(encoder_weights(model))
    warm, quarter, whole = found
    assert all(map(torch.equal, warm, quarter))
    assert not all(map(torch.equal, warm, whole))


def test_validation_and_best_checkpoint_have_the_averaged_weights(tmp_path, structures):
    model, (train, valid) = potential(), structures
    training = {**QUICK, "epochs": 1, "ema_decay": 0.5, "lr": 0.05}
    config = {"training": training, "data": {"reference_energies": "none"}}
    result = blips.fit(model, train, valid=valid, config=config, folder=tmp_path, display=False)
    best = read_tensors(tmp_path / "best.safetensors")[0]
    last = read_tensors(tmp_path / "last.safetensors")[0]
    name = "backbone.embedding.weight"
    assert torch.equal(best[name], last[f"average.{name}"])
    assert not torch.equal(best[name], last[f"model.{name}"])
    found = model.predict(valid, method="map")  # the model ends with its best weights
    forces = np.concatenate([atoms.get_forces() for atoms in valid])
    energy = [atoms.get_potential_energy() for atoms in valid]
    expected = np.abs(found.forces - forces).mean() + 0.1 * np.abs(found.energy - energy).mean()
    row = result.progress.history[0]
    assert row["valid_loss"] == pytest.approx(expected, rel=1e-3)
    assert row["valid_mae_forces"] == pytest.approx(
        1000 * np.abs(found.forces - forces).mean(), rel=0.01
    )
    per_atom = np.abs(found.energy - energy) / found.n_atoms
    assert row["valid_mae_energy"] == pytest.approx(1000 * per_atom.mean(), rel=0.01)
    assert f"MAE {row['valid_mae_energy']:.3g} meV/atom" in str(result)


def test_the_elbo_divides_the_kl_by_the_number_of_data(structures):
    model, data = potential(), StructureData(structures[0], 4.0)
    config = TrainingConfig(noise=True, kl_reduction="elbo")
    few, many = (
        Objective(model, config, num_data)(data.batch(range(4)), ("step", 0), 1.0).parts["kl"]
        for num_data in (12, 120)
    )
    assert few == pytest.approx(10 * many)


@pytest.mark.parametrize("loss", ["nll", "crps"])
def test_a_plain_backbone_has_no_samples_for_a_loss_of_distributions(tmp_path, structures, loss):
    with pytest.raises(ConfigError, match=f"loss={loss} needs sampled weights"):
        fit(PaiNN(**TINY), structures, tmp_path, loss=loss)


def test_training_forgets_the_calibration_of_the_weights_before(tmp_path, structures):
    model = potential()
    model.calibration["forces"] = ScaleCalibrator(3.0)
    fit(model, structures, tmp_path, epochs=1)
    assert model.calibration == {}
    model.calibration["forces"] = ScaleCalibrator(3.0)
    with pytest.raises(ConfigError, match="holds a run already"):
        fit(model, structures, tmp_path, epochs=1)
    assert model.calibration  # nothing was trained


def test_double_precision_trains_on_all_digits_of_positions_and_forces(tmp_path, structures):
    data = fit(potential(), structures, tmp_path, epochs=1, dtype="float64").train_data
    batch, atoms = data.batch([0]), data.structures[0]
    between = np.diff(atoms.positions, axis=0)  # the graph may be moved as a whole
    assert np.abs(np.diff(batch.graph.positions.numpy(), axis=0) - between).max() < 1e-14
    assert np.array_equal(batch.targets["forces"].numpy(), atoms.get_forces())


def test_streamed_structures_have_reference_energies_and_known_elements(tmp_path, structures):
    files = [tmp_path / name for name in ("train.extxyz", "valid.extxyz")]
    for file, frames in zip(files, structures, strict=True):
        ase.io.write(file, frames)
    models = []
    for stream in (True, False):
        torch.manual_seed(0)
        models.append(PaiNN(**TINY))
        training = {**QUICK, "epochs": 1, "lr": 1e-9}  # the weights decide what is left
        config = {"data": {"stream": stream}, "training": training}
        folder = tmp_path / str(stream)
        blips.fit(models[-1], files[0], valid=files[1], config=config, folder=folder, display=False)
    streamed, in_memory = models
    assert streamed.trained_numbers == in_memory.trained_numbers == {1, 7}
    assert float(in_memory.reference.shift.abs().max()) > 0
    assert torch.allclose(streamed.reference.shift, in_memory.reference.shift, rtol=1e-6)


def test_a_data_set_is_conditioned_with_the_units_of_its_own_labels(tmp_path, structures):
    in_kcal = []
    for frames in structures:
        copies = [atoms.copy() for atoms in frames]
        for copy, atoms in zip(copies, frames, strict=True):
            energy, forces = atoms.get_potential_energy(), atoms.get_forces()
            copy.calc = SinglePointCalculator(
                copy, energy=energy / KCAL_PER_MOL, forces=forces / KCAL_PER_MOL
            )
        in_kcal.append(copies)
    scales = []
    for frames, labels in ((structures, Labels()), (in_kcal, Labels(energy_unit="kcal/mol"))):
        model, sets = potential(), [StructureData(part, 4.0, labels=labels) for part in frames]
        fit(model, sets, tmp_path / labels.energy_unit[:2], epochs=1, condition=True)
        assert model.backbone.labels == labels
        scales.append(model.conditioned().scale.scale)
    assert scales[1] == pytest.approx(scales[0], rel=1e-2)


def test_training_leaves_no_constant_per_element_in_the_energies(tmp_path, structures):
    both = [*structures[0], *structures[1]]
    labels = np.array([atoms.get_potential_energy() for atoms in both])
    weights = {"energy": 1e-6, "forces": 1.0}  # by itself the loss would leave a constant
    model = potential(1)
    fit(model, structures, tmp_path, epochs=2, weights=weights)
    left = model.predict(both, method="map").array("energy") - labels
    assert abs(left.mean()) < 0.3 * left.std()
    saved = read_tensors(tmp_path / "best.safetensors")[0]
    name = "backbone.reference.shift"
    assert torch.equal(saved[name], model.state_dict()[name])
    train, valid = structures
    config = {"training": QUICK | {"epochs": 2, "weights": weights}}
    options = {"valid": valid, "config": config, "folder": tmp_path, "display": False}
    blips.fit(potential(1), train, resume=True, **options)  # it had ended: nothing more to do
    assert torch.equal(saved[name], read_tensors(tmp_path / "best.safetensors")[0][name])


def test_errors_name_the_frame_of_the_file_that_was_split(tmp_path, structures):
    frames = [atoms.copy() for atoms in structures[0][:10]]
    for copy, atoms in zip(frames, structures[0], strict=False):
        copy.calc = None if copy is frames[7] else atoms.calc
    ase.io.write(tmp_path / "frames.extxyz", frames)
    with pytest.raises(InputError, match=r"frames\.extxyz, frame 7: no energy"):
        fit(potential(), (tmp_path / "frames.extxyz", 0.3), tmp_path)


def test_a_run_is_not_resumed_with_other_structures_that_split_anew(tmp_path, structures):
    train, _ = structures
    fit(potential(), (train, 0.3), tmp_path, epochs=1)
    before = (tmp_path / "split.json").read_text()
    config = {"training": {**QUICK, "epochs": 2}}
    options = {"valid": 0.3, "config": config, "folder": tmp_path, "display": False}
    with pytest.raises(ConfigError, match="not those that it began with"):
        blips.fit(potential(), train[:-3], resume=True, **options)
    assert (tmp_path / "split.json").read_text() == before
    assert blips.fit(potential(), train, resume=True, **options).progress.epoch == 2


def test_names_of_labels_are_those_of_the_configuration(tmp_path, structures):
    """No other label of the file is checked, or announced."""
    frames = [atoms.copy() for atoms in structures[0]]
    for copy, atoms in zip(frames, structures[0], strict=True):
        copy.info |= {"mine": atoms.get_potential_energy(), "REF_energy": 1.0, "energy": "none"}
        copy.arrays["push"] = atoms.get_forces()
    labels = {"energy_key": "mine", "forces_key": "push"}
    config = {"data": {"labels": labels}, "training": {**QUICK, "epochs": 1}}
    blips.fit(potential(), frames, valid=0.3, config=config, folder=tmp_path, display=False)


@pytest.mark.parametrize(
    ("energies", "message"),
    [({"H": -1.0}, "lacks N of the training"), ({"N": 0.0, "H": 0.0, "Qq": 0.0}, "Qq.*no such")],
)
def test_given_reference_energies_have_all_elements(tmp_path, structures, energies, message):
    config = {"data": {"reference_energies": energies}, "training": QUICK}
    with pytest.raises(ConfigError, match=message):
        blips.fit(potential(), structures[0], config=config, folder=tmp_path, display=False)


def test_elements_that_only_the_reference_energies_have_are_not_trained_on(tmp_path, structures):
    model, energies = potential(), {"H": -1.0, "N": -2.0, "O": -3.0}
    config = {"data": {"reference_energies": energies}, "training": {**QUICK, "epochs": 1}}
    blips.fit(model, structures[0], config=config, folder=tmp_path, display=False)
    assert model.backbone.trained_numbers == {1, 7}
    assert model.backbone.reference.shift[[1, 7, 8]].tolist() == [-1.0, -2.0, -3.0]


def test_a_split_needs_something_to_validate_on(tmp_path, structures):
    with pytest.raises(ConfigError, match=r"valid=0\.1 sets none of 4 structures aside"):
        fit(potential(), (structures[0][:4], 0.1), tmp_path)


def test_a_split_by_groups_needs_the_group_of_every_structure(tmp_path, structures):
    frames = [atoms.copy() for atoms in structures[0]]
    for number, (copy, atoms) in enumerate(zip(frames, structures[0], strict=True)):
        copy.calc = atoms.calc
        copy.info["run"] = number // 3
    del frames[5].info["run"]
    config = {"data": {"group_key": "run"}, "training": {**QUICK, "epochs": 1}}
    options = {"valid": 0.3, "config": config, "folder": tmp_path, "display": False}
    with pytest.raises(InputError, match="frame 5 has no 'run'"):
        blips.fit(potential(), frames, **options)
    frames[5].info["run"] = 1
    blips.fit(potential(), frames, **options)
    split = Split.load(tmp_path / "split.json")
    assert not {k // 3 for k in split.train} & {k // 3 for k in split.valid}
