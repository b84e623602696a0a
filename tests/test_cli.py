"""The command as users meet it: real processes only where that matters, else Typer's runner."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
import yaml
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from typer.testing import CliRunner

import blips
from blips.backbones import PaiNN
from blips.cli import app
from blips.errors import BlipsError
from helpers import quartz


def labelled(count: int, seed: int) -> list[Atoms]:
    rng = np.random.default_rng(seed)
    frames = []
    for _ in range(count):
        atoms = molecule("NH3")
        atoms.positions += rng.normal(scale=0.05, size=(4, 3))
        energy, forces = rng.normal(), rng.normal(size=(4, 3))
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
        frames.append(atoms)
    return frames


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model and labelled structures."""
    torch.manual_seed(0)
    model = blips.bayesianize(PaiNN(cutoff=4.0, features=8, blocks=1, num_basis=4))
    blips.save(model, tmp_path / "model.safetensors")
    ase.io.write(tmp_path / "data.extxyz", labelled(24, seed=0))
    return tmp_path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_version_needs_no_command():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"blips {blips.__version__}\n")


@pytest.mark.parametrize("labels", ["none", "ase", "mace"])
def test_predictions_are_written_beside_labels_and_ase_reads_them(folder, labels):
    frames = ase.io.read(folder / "data.extxyz", ":")
    true = [frame.get_potential_energy() for frame in frames]
    for frame, energy in zip(frames, true, strict=True):
        if labels != "ase":
            frame.calc = None
        if labels == "mace":
            frame.info["REF_energy"] = energy
    ase.io.write(folder / "in.extxyz", frames)
    with pytest.warns(match="REF_energy, as MACE") if labels == "mace" else nullcontext():
        text = run(
            "predict", folder / "model.safetensors", folder / "in.extxyz", "-o", folder / "o.extxyz"
        )
    assert ("labels are kept" in text) == (labels != "none")
    found = ase.io.read(folder / "o.extxyz", ":")
    expected = blips.load(folder / "model.safetensors").predict(frames)
    if labels == "none":
        energies = [frame.get_potential_energy() for frame in found]
    else:
        energies = [frame.info["predicted_energy"] for frame in found]
    np.testing.assert_allclose(energies, expected.energy, atol=1e-6)
    forces = [f.arrays["predicted_forces"] if labels == "ase" else f.get_forces() for f in found]
    np.testing.assert_allclose(np.concatenate(forces), expected.forces, atol=1e-6)
    if labels == "ase":
        assert [frame.get_potential_energy() for frame in found] == pytest.approx(true)
    if labels == "mace":
        assert [frame.info["REF_energy"] for frame in found] == pytest.approx(true)
        assert all("energy" not in frame.calc.results for frame in found)
    assert found[0].info["energy_uncertainty"] > 0
    assert found[0].arrays["forces_uncertainty"].shape == (4, 3)


def test_calibrate_then_evaluate(folder):
    calibrated = folder / "calibrated.safetensors"
    text = run(
        "calibrate", folder / "model.safetensors", folder / "data.extxyz",
        "-o", calibrated, "--samples", 64,
    )  # fmt: skip
    assert "every std is multiplied by" in text
    assert set(blips.load(calibrated).calibration) == {"energy", "forces"}
    arguments = [
        "evaluate", calibrated, folder / "data.extxyz",
        "--folder", folder / "evaluation", "--bootstrap", 20, "--samples", 64,
    ]  # fmt: skip
    text = run(*arguments)
    assert len(text.splitlines()) <= 30
    assert "Forces are off by" in text
    assert "Energies are off by" in text
    assert "nll_component" in run(*arguments, "--all")
    metrics = json.loads((folder / "evaluation" / "metrics.json").read_text())
    # The data, the samples and the seed are those of the calibration: exactly one by construction.
    assert metrics["calibrated"]["forces"]["zms"]["value"] == pytest.approx(1.0, abs=1e-6)
    figures = {path.name for path in (folder / "evaluation" / "figures").iterdir()}
    assert figures == {
        "parity_energy.png",
        "parity_forces.png",
        "std_error.png",
        "reliability.png",
        "rejection.png",
    }


def test_train_info_validate_template(folder, monkeypatch):
    monkeypatch.chdir(folder)
    template = yaml.safe_load(run("template"))
    template["data"].update(train="data.extxyz", valid=0.25)
    template["model"]["hyperparameters"] = {"cutoff": 4.0, "features": 8, "blocks": 1}
    (folder / "config.yaml").write_text(yaml.safe_dump(template))
    assert "epochs: 3" in run("validate", "config.yaml", "training.epochs=3")
    text = run("train", "config.yaml", "training.epochs=2", "training.tensorboard=false")
    assert "runs/blips" in text
    text = run("info", "runs/blips/best.safetensors")
    assert text.startswith("PaiNN, ")
    assert "error bars: conditioned on 18 structures" in text
    text = run("info", "runs/blips/best.safetensors", "--all")
    assert '"backbone": "painn"' in text
    assert "edge rows" in text


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")  # CHGNet's
def test_finetune_and_export_a_released_model(tmp_path, monkeypatch):
    """The commands of docs/fine-tuning.md, with fewer epochs."""
    package = pytest.importorskip("chgnet.model", reason="chgnet is not installed")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    frames = [quartz(rattle=0.05, seed=seed) for seed in range(5)]
    for atoms in frames:
        forces = rng.normal(scale=0.5, size=(9, 3))
        atoms.calc = SinglePointCalculator(atoms, energy=rng.normal(scale=0.1), forces=forces)
    ase.io.write("silica.extxyz", frames)
    ase.io.write("general.extxyz", frames[:2])
    (tmp_path / "finetune.yaml").write_text(run("template", "finetune"))
    quick = ["data.train=silica.extxyz", "data.valid=0.2", "training.tensorboard=false"]
    text = run(
        "finetune", "finetune.yaml", *quick, "training.epochs=1", "training.anchor_weight=0.1",
        "data.replay=general.extxyz", "training.replay_weight=0.5",
    )  # fmt: skip
    assert "run in runs/finetune" in text
    best = "runs/finetune/best.safetensors"
    run("export", best, "silica-chgnet.pth.tar")
    new = frames[0].copy()
    theirs = package.CHGNet.from_file("silica-chgnet.pth.tar")
    new.calc = package.CHGNetCalculator(theirs, use_device="cpu")
    ours = blips.load(best).predict(frames[:1], method="map")
    assert new.get_potential_energy() == pytest.approx(ours.energy[0], abs=1e-3)
    np.testing.assert_allclose(new.get_forces(), ours.forces, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["finetune", "data.train=data.extxyz"], "fine-tuning starts from released weights"),
        (["export", "model.safetensors", "x"], "PaiNN, which is blips' own"),
        (["condition", "chgnt", "data.extxyz", "-o", "x"], "neither a file nor a released model"),
        (["template", "tune"], "unknown template 'tune'; use one of train, finetune"),
    ],
)
def test_mistakes_with_released_models_are_named(folder, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    with pytest.raises(BlipsError, match=message):
        run(*arguments)
    assert not (folder / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "training.epoch=3"], "did you mean 'epochs'"),
        (["predict", "absent.safetensors", "data.extxyz", "-o", "x"], "no checkpoint"),
        (["predict", "model.safetensors", "absent.xyz", "-o", "x"], "no such file"),
        (["evaluate", "model.safetensors", "bad.xyz"], "bad.xyz"),
    ],
)
def test_mistakes_are_one_line_without_traceback(folder, arguments, message):
    (folder / "bad.xyz").write_text("2\nProperties=species:S:1:pos:R:3\nH 0 0 0\n")
    program = "import sys; from blips.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (folder / "x").exists()
