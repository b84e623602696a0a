"""The whole walk as a new user takes it, through the real command: what is read on the way.

Own data from scratch, a released model, fine-tuning and export, dynamics, active learning, reports.
Every step is a process. Each must end as it should, say first what matters, say little, and show
no traceback; coverage is checked on real labels.
"""

import json
import re
from pathlib import Path

import ase.io
import numpy as np
import pytest
import yaml
from ase.calculators.singlepoint import SinglePointCalculator

from active.campaigns import tiny_campaign
from blips.data.ammonia import load_ammonia
from helpers import quartz

MOST_LINES = 30
MACE_NAMES = ["--energy-key", "REF_energy", "--forces-key", "REF_forces"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Where everything happens, with labelled ammonia in it."""
    place = tmp_path_factory.mktemp("walk")
    for split in ("train", "valid", "test_ood"):
        ase.io.write(place / f"{split}.extxyz", load_ammonia(split))
    return place


@pytest.fixture(scope="module")
def step(command, place):
    """(arguments, first line that is expected) -> what a user reads."""

    def take(*arguments, first: str = "", code: int = 0) -> str:
        result = command(*arguments, cwd=place, timeout=400)
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr + result.stdout
        read = result.stdout if code == 0 else result.stderr
        lines = read.splitlines()
        assert re.match(first, lines[0] if lines else ""), read
        if "--all" not in arguments and arguments[0] not in ("template", "validate"):
            assert len(lines) <= MOST_LINES, read
        return read

    return take


@pytest.fixture(scope="module")
def trained(step, place) -> str:
    """A potential for ammonia, trained from a template."""
    (place / "config.yaml").write_text(step("template", first=r"model: +# "))
    small = ["model.hyperparameters.features=32", "model.hyperparameters.cutoff=4.0"]
    small += ["training.epochs=60", "training.threads=1", "training.tensorboard=false"]
    sources = ["config.yaml", "data.train=train.extxyz", "data.valid=valid.extxyz", *small]
    step("validate", *sources[:3], "--json", first=r"\{")
    step("train", *sources)
    assert (place / "runs" / "blips" / "best.safetensors").is_file()
    return "runs/blips/best.safetensors"


def test_own_data_from_scratch(step, place, trained):
    step("info", trained, first="PaiNN")
    widths = []
    for name, low in (("valid", 0.75), ("test_ood", 0.6)):
        read = step(
            "evaluate", trained, f"{name}.extxyz", "--folder", name, "--bootstrap", 50,
            first=r"\d+ structures, all with energies and forces",
        )  # fmt: skip
        assert "Forces are off by" in read
        metrics = json.loads((place / name / "metrics.json").read_text())["best"]
        assert low <= metrics["forces"]["coverage_90"]["value"] <= 1.0
        widths.append(metrics["forces"]["rms_std"]["value"])
    assert widths[1] > 2 * widths[0]  # error bars grow away from the data


def test_predictions_lie_beside_labels_and_have_a_report(step, place, trained):
    step(
        "predict", trained, "test_ood.extxyz", "-o", "predicted.extxyz",
        first="129 structures written to predicted.extxyz",
    )  # fmt: skip
    before, after = (ase.io.read(place / f"{n}.extxyz", ":") for n in ("test_ood", "predicted"))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new.get_forces(), old.get_forces(), atol=1e-6)
        assert new.arrays["predicted_forces"].shape == new.arrays["forces_uncertainty"].shape
    for target in ("runs/blips", "predicted.extxyz"):
        step("report", target, "-o", "report.html", "--bootstrap", 20, first="report in")
        assert "<html" in (place / "report.html").read_text()[:500]


def test_labels_under_names_of_mace(step, place, trained):
    frames = load_ammonia("valid")
    for atoms in frames:
        atoms.info["REF_energy"] = atoms.get_potential_energy()
        atoms.arrays["REF_forces"] = atoms.get_forces()
        atoms.calc = None
    ase.io.write(place / "mace.extxyz", frames)
    quick = ["--folder", "mace", "--bootstrap", 10]
    plain = step("evaluate", trained, "valid.extxyz", *quick)
    for names in ([], MACE_NAMES):
        assert step("evaluate", trained, "mace.extxyz", *names, *quick) == plain
    names = ["data.labels.energy_key=REF_energy", "data.labels.forces_key=REF_forces"]
    small = ["model.hyperparameters={cutoff: 4.0, features: 8, blocks: 1}", "training.epochs=1"]
    small += ["data.train=mace.extxyz", "training.tensorboard=false", "folder=runs/mace"]
    step("train", *small, *names)
    model = "runs/mace/best.safetensors"
    step("evaluate", model, "mace.extxyz", *quick, first="14 structures, all")
    step("evaluate", model, "valid.extxyz", *quick, code=2, first="blips: .*--energy-key")


def test_dynamics(step, place, trained):
    ase.io.write(place / "start.extxyz", load_ammonia("train")[0])
    step("md", trained, "start.extxyz", "--steps", 20, "--high", 5.0, first="20 steps done")
    hot = ["--temperature", 300, "--to", 6000, "--steps", 400, "--high", 0.5]
    step("md", trained, "start.extxyz", *hot, "--folder", "hot", first="stopped after .* steps: ")
    step("md", trained, "start.extxyz", "--high", 5.0, first="blips: .*--overwrite", code=2)


def test_active_learning(step, place):
    config = tiny_campaign(place / "learning", stop={"rounds": 1}, explore={"potential": "mean"})
    (place / "campaign.yaml").write_text(yaml.safe_dump(config))
    step("active", "campaign.yaml", "--quiet", first=r"\d+ labels")
    step("report", config["folder"], "-o", "campaign.html", first="report in")


@pytest.mark.slow
def test_a_released_model_is_fine_tuned_exported_and_judged(step, place, reference_data):
    pytest.importorskip("chgnet.model", reason="chgnet is not installed")
    frames = [quartz(rattle=0.05, seed=seed) for seed in range(5)]
    for atoms in frames:
        forces = np.random.default_rng(0).normal(scale=0.5, size=(9, 3))
        atoms.calc = SinglePointCalculator(atoms, energy=-60.0, forces=forces)
    ase.io.write(place / "silica.extxyz", frames)
    (place / "finetune.yaml").write_text(step("template", "finetune"))
    quick = ["training.epochs=1", "training.tensorboard=false", "data.train=silica.extxyz"]
    step("finetune", "finetune.yaml", *quick, "data.valid=0.2")
    step("export", "runs/finetune/best.safetensors", "mine.pth.tar", first="mine.pth.tar written")
    step("info", "chgnet", first="CHGNet")
    step("predict", "chgnet", "silica.extxyz", "-o", "silica-out.extxyz", first="5 structures")
    real = ase.io.read(reference_data / "mptrj" / "mptrj-random-1k.xyz", ":80")
    ase.io.write(place / "real.extxyz", [atoms for atoms in real if len(atoms) <= 12][:20])
    read = step("evaluate", "chgnet", "real.extxyz", "--bootstrap", 50, "--folder", "real")
    assert "Forces are off by" in read
    metrics = json.loads((place / "real" / "metrics.json").read_text())["chgnet"]
    assert 0.75 <= metrics["forces"]["coverage_90"]["value"] <= 1.0
    step(
        "condition", "chgnet", "silica.extxyz", "--valid", "silica.extxyz", "-o", "c.safetensors",
        first="conditioned",
    )  # fmt: skip
