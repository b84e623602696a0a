from pathlib import Path

import pytest

from blips.backbones.base import Backbone
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
    noisy, plain = (load(tmp_path / stage / "best.safetensors") for stage in ("noise", "plain"))
    assert isinstance(noisy, BayesianPotential)
    assert isinstance(plain, Backbone)
    epochs = accuracy.PROFILES["quick"].sets["nh3"].training["epochs"]
    halves = [run.spec.settings["training"]["epochs"]]
    halves.append(run.spec.settings["noise"]["training"]["epochs"])
    assert sum(halves) == 4 * epochs
    assert found.metrics.keys() >= {c.metric for c in accuracy.COLUMNS} - {"cpu_seconds"}
    assert accuracy_run.execute(run).metrics == found.metrics  # read from its folder


def test_recipes_cost_about_what_four_plain_trainings_cost():
    """Steps count, however small the batch; larger batches and widths in proportion."""
    for recipe in accuracy.RECIPES.values():
        if recipe is not accuracy.RECIPES["plain"]:
            assert recipe.epochs * recipe.width / min(1.0, recipe.batch) == 4


def test_released_models_keep_their_width(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("BLIPS_DATA", str(tmp_path))
    names = {spec.name for spec in accuracy.specs("default")}
    assert {"silica-32-noise", "silica-32-half_batch", "nh3-wide"} <= names
    assert "silica-32-wide" not in names
    found = {spec.name: spec.settings for spec in accuracy.specs("default")}
    assert found["silica-32-long"]["training"]["epochs"] == 120
    assert found["silica-32-half_batch"]["training"]["batch_size"] == 1
    assert found["silica-32-noise"]["noise"]["training"]["kl_weight"] == 3e-5
