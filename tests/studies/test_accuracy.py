from pathlib import Path

from blips.backbones.base import Backbone
from blips.potential import BayesianPotential
from blips.train.checkpoint import load
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
    epochs = accuracy.PROFILES["quick"].sets["nh3"][1]
    halves = [run.spec.settings["training"]["epochs"]]
    halves.append(run.spec.settings["noise"]["training"]["epochs"])
    assert sum(halves) == 4 * epochs
    assert found.metrics.keys() >= {c.metric for c in accuracy.COLUMNS} - {"cpu_seconds"}
    assert accuracy_run.execute(run).metrics == found.metrics  # read from its folder


def test_recipes_cost_about_what_four_plain_trainings_cost():
    """Steps of a batch of 8 and 64 features count 1; larger batches and widths in proportion."""
    for recipe in accuracy.RECIPES.values():
        if recipe is not accuracy.RECIPES["plain"]:
            per_structure = 8 / min(8, recipe.training.get("batch_size", 8))
            assert recipe.epochs * recipe.width * per_structure == 4
