from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blips.backbones.base import Backbone
from blips.baselines import predict_plain
from blips.potential import BayesianPotential
from blips.train.released import load
from studies.accuracy import run as accuracy_run
from studies.accuracy import study as accuracy
from studies.spec import Run


def run_of(recipe: str, folder: Path) -> Run:
    spec = next(s for s in accuracy.specs("quick") if s.name == f"nh3-{recipe}")
    return Run(spec, folder, folder / "figures", {})


def test_noise_first_then_a_plain_model_that_has_its_means(tmp_path: Path):
    run = run_of("noise", tmp_path)
    found = accuracy_run.execute(run)
    noisy, plain = (load(tmp_path / stage / "best.safetensors") for stage in ("first", "plain"))
    assert isinstance(noisy, BayesianPotential)
    assert isinstance(plain, Backbone)
    epochs = accuracy.PROFILES["quick"].sets["nh3"].training["epochs"]
    halves = [run.spec.settings["training"]["epochs"]]
    halves.append(run.spec.settings["first"]["training"]["epochs"])
    assert sum(halves) == 4 * epochs
    assert found.metrics.keys() >= {c.metric for c in accuracy.COLUMNS} - {"cpu_seconds"}
    assert accuracy_run.execute(run).metrics == found.metrics  # read from its folder


def test_noise_to_the_end_measures_the_means_of_blip(tmp_path: Path, monkeypatch):
    recipes = {"blip": accuracy.Recipe(epochs=1, rate=2.0, first="noise", share=1.0)}
    quick = replace(accuracy.PROFILES["quick"], recipes=recipes)
    monkeypatch.setitem(accuracy.PROFILES, "quick", quick)
    run = run_of("blip", tmp_path)
    found = accuracy_run.execute(run)
    noisy = load(tmp_path / "first" / "best.safetensors")
    assert isinstance(noisy, BayesianPotential)
    data = accuracy_run.load_set("nh3")
    means = predict_plain(noisy.to_base(), data.near[:8])
    errors = abs(means.array("forces") - np.concatenate([a.get_forces() for a in data.near[:8]]))
    assert found.metrics["near_forces_mae"]["value"] == pytest.approx(errors.mean(), rel=1e-6)
    assert not (tmp_path / "plain").exists()
    given = quick.sets["nh3"].training["lr"]
    assert run.spec.settings["first"]["training"]["lr"] == 2 * given


def test_recipes_cost_about_what_four_plain_trainings_cost():
    """Steps count, however small the batch; larger batches and widths in proportion."""
    for name, recipe in accuracy.RECIPES.items():
        expected = {"plain": 1, "single": 8}.get(name, 4)
        assert recipe.epochs * recipe.width / min(1.0, recipe.batch) == expected


def test_released_models_keep_their_width(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("BLIPS_DATA", str(tmp_path))
    names = {spec.name for spec in accuracy.specs("default")}
    assert {"silica-32-noise", "silica-32-half_batch", "nh3-wide"} <= names
    assert not {"silica-32-wide", "silica-32-quarter_batch"} & names
    found = {spec.name: spec.settings for spec in accuracy.specs("default")}
    assert found["silica-32-long"]["training"]["epochs"] == 120
    assert found["silica-32-half_batch"]["training"]["batch_size"] == 1
    assert found["silica-32-noise"]["first"]["training"]["kl_weight"] == 3e-5
