"""The command as users meet it: real processes only where that matters, else Typer's runner."""

import json
import subprocess
import sys
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


def test_predict_writes_uncertainties_that_ase_reads(folder):
    output = folder / "out.extxyz"
    run("predict", folder / "model.safetensors", folder / "data.extxyz", "-o", output)
    frames = ase.io.read(output, index=":")
    assert len(frames) == 24
    assert frames[0].info["energy_uncertainty"] > 0
    assert frames[0].arrays["forces_uncertainty"].shape == (4, 3)
    potential = blips.load(folder / "model.safetensors")
    expected = potential.predict(ase.io.read(folder / "data.extxyz", index=":"))
    energies = [frame.get_potential_energy() for frame in frames]
    np.testing.assert_allclose(energies, expected.energy, atol=1e-6)


def test_calibrate_then_evaluate(folder):
    calibrated = folder / "calibrated.safetensors"
    text = run("calibrate", folder / "model.safetensors", folder / "data.extxyz", "-o", calibrated)
    assert "'kind': 'scale'" in text
    assert set(blips.load(calibrated).calibration) == {"energy", "forces"}
    run(
        "evaluate", calibrated, folder / "data.extxyz",
        "--folder", folder / "evaluation", "--bootstrap", 20, "--samples", 64,
    )  # fmt: skip
    metrics = json.loads((folder / "evaluation" / "metrics.json").read_text())
    # The data, the samples and the seed are those of the calibration: exactly one by construction.
    assert metrics["calibrated"]["forces"]["zms"]["value"] == pytest.approx(1.0, abs=1e-6)
    figures = {path.name for path in (folder / "evaluation" / "figures").iterdir()}
    assert figures == {
        "parity_energy.png",
        "parity_forces.png",
        "sigma_error.png",
        "reliability.png",
        "rejection.png",
        "elements.png",
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
    assert '"backbone": "painn"' in text
    assert "edge rows" in text


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
