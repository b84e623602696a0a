import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.stats import norm
from scoringrules import crps_normal

from blips.baselines import DeepEnsemble
from blips.errors import InputError
from blips.potential import BayesianPotential
from blips.prediction import Prediction
from blips.train.loop import Trainer
from studies.baselines import MCDropout
from studies.nbody import run as nbody_run
from studies.nbody import study as nbody
from studies.nbody.data import POSITIONS
from studies.reproduce import reproduce
from studies.spec import Layout, Run, RunSpec

REPOSITORY = Path(__file__).parents[2]
STD = f"{POSITIONS}_std"
QUICK = {spec.id: spec for spec in nbody.specs("quick")}


def tiny(run_id: str, **training: int) -> RunSpec:
    """A run of the quick profile, smaller still."""
    spec = QUICK[run_id]
    settings = dict(spec.settings)
    settings["data"] = {"sizes": {"train": 8, "valid": 4, "test": 6}, "whole_stream": False}
    settings["hyperparameters"] = {"hidden": 4, "layers": 2}
    settings["training"] = settings["training"] | {"epochs": 2, "checkpoint_every": 1} | training
    return replace(spec, settings=settings)


@pytest.fixture(scope="module")
def data():
    return nbody_run.load_data(tiny("egnn-base-seed0").settings["data"])


@pytest.fixture
def in_tmp(tmp_path: Path, data, monkeypatch: pytest.MonkeyPatch):
    """Runs in this process, on simulations that are made once."""
    monkeypatch.setattr(nbody_run, "load_data", lambda settings: data)

    def run(spec: RunSpec, folder: str = "run", **needs: Path) -> Run:
        work = tmp_path / folder
        work.mkdir(exist_ok=True)
        return Run(spec, work, tmp_path / "figures", needs)

    return run


def test_two_runs_from_the_command_line(tmp_path: Path):
    folders = ["--folder", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    chosen = ["--only", "egnn-base-seed0", "--only", "egnn-blip*"]
    command = [sys.executable, "-m", "studies", "nbody", "--profile", "quick", *folders, *chosen]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 runs finished, 0 were finished before, 0 failed" in done.stdout
    layout = Layout.of("nbody", "quick", tmp_path / "results", tmp_path / "runs")
    files = sorted(path.name for path in layout.results.glob("*.*"))
    assert files == [
        "egnn-base-seed0.json",
        "egnn-blip_local-seed0.json",
        "table.md",
        "table.tex",
    ]
    assert sorted(path.name for path in layout.figures.iterdir()) == [
        "egnn-blip_local-seed0-reliability.png",
        "egnn-blip_local-seed0-std_error.png",
    ]
    result = json.loads((layout.results / "egnn-blip_local-seed0.json").read_text())
    assert result["metrics"].keys() >= {"mse", "nll", "crps", "crps_sum", "ece", "mse_map"}
    assert -1 <= result["metrics"]["spearman_structure"]["value"] <= 1
    row = next(x for x in (layout.results / "table.md").read_text().splitlines() if "local" in x)
    shown = f"{10 * result['metrics']['mse']['value']:.3f}"
    assert row.startswith(f"| EGNN | BLIP, local (paper) | 1 | {shown} | 0.060 ± 0.003 |")

    again = reproduce(
        "nbody",
        "quick",
        only=["egnn-base-seed0", "egnn-blip*"],
        folder=tmp_path / "results",
        runs=tmp_path / "runs",
        console=Console(quiet=True),
    )
    assert again.reused == ["egnn-base-seed0", "egnn-blip_local-seed0"]


@pytest.mark.parametrize("run_id", ["egnn-blip_local-seed0", "egnn-mc_dropout_0.2-seed0"])
def test_an_interrupted_run_finds_what_an_uninterrupted_one_does(
    run_id: str, in_tmp, monkeypatch: pytest.MonkeyPatch
):
    spec = tiny(run_id, epochs=3)
    whole = nbody_run.execute(in_tmp(spec, "whole"))
    finish = Trainer._finish_epoch
    epochs: list[int] = []

    def finish_and_stop(self: Trainer, epoch: int, row: dict[str, float]) -> None:
        finish(self, epoch, row)
        epochs.append(epoch)
        if epochs == [1, 2]:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_finish_epoch", finish_and_stop)
    with pytest.raises(KeyboardInterrupt):
        nbody_run.execute(in_tmp(spec, "parts"))
    resumed = nbody_run.execute(in_tmp(spec, "parts"))
    assert epochs == [1, 2, 3]
    assert resumed.metrics == whole.metrics
    assert whole.details["epochs"] == 3


def test_metrics_on_the_way_leave_the_run_as_it_is(in_tmp):
    spec = tiny("egnn-blip_local-seed0", epochs=3)
    whole = nbody_run.execute(in_tmp(spec, "whole"))
    measured = replace(spec, settings={**spec.settings, "milestones": [1, 2]})
    found = nbody_run.execute(in_tmp(measured, "measured"))
    assert found.metrics == whole.metrics
    curve = found.details["curve"]
    assert list(curve) == ["1", "2"]
    assert all(np.isfinite(list(row.values())).all() and len(row) == 3 for row in curve.values())
    assert "curve" not in whole.details


def test_milestones_of_several_seeds_are_drawn_together(tmp_path: Path):
    specs = [spec for spec in nbody.specs("long") if spec.name == "egnn-blip_local"][:2]
    layout = Layout.of("nbody", "long", tmp_path, tmp_path)
    layout.results.mkdir(parents=True)
    nbody.draw(specs, layout)
    assert not layout.figures.exists()
    for k, spec in enumerate(specs):
        curve = {"50": {"mse": 0.01 + k, "nll": 1.0}, "100": {"mse": 0.02}}
        result = {"hash": spec.hash, "details": {"curve": curve}}
        layout.result_file(spec).write_text(json.dumps(result))
    milestones = nbody._milestones(specs, layout, "egnn-blip_local", "mse")
    assert milestones == {50: [0.01, 1.01], 100: [0.02, 0.02]}
    nbody.draw(specs, layout)
    assert (layout.figures / "epochs.png").stat().st_size > 1000


def test_the_ensemble_is_made_of_the_base_runs(in_tmp, data):
    folders = {}
    for seed in range(4):
        run = in_tmp(tiny(f"egnn-base-seed{seed}"), f"base{seed}")
        assert nbody_run.execute(run).metrics.keys() == {"mae", "rmse", "mse"}
        folders[run.spec.id] = run.folder
    spec = tiny("egnn-deep_ensemble_4-seed0")
    assert spec.needs == tuple(folders)
    ensemble, details = nbody_run._trained(in_tmp(spec, "ensemble", **folders), data)
    assert isinstance(ensemble, DeepEnsemble)
    assert details["members"] == list(folders)
    prediction = nbody_run.predict(ensemble, data["test"], 100, 0)
    members = [
        nbody_run.predict(model, data["test"], 0, 0).array(POSITIONS) for model in ensemble.models
    ]
    np.testing.assert_allclose(prediction.array(POSITIONS), np.mean(members, axis=0), rtol=1e-6)
    np.testing.assert_allclose(prediction.array(STD), np.std(members, axis=0, ddof=1), rtol=1e-6)


def test_metrics_have_the_stated_definitions():
    rng = np.random.default_rng(0)
    target, noise = rng.normal(size=(2, 20, 3))
    std = rng.uniform(0.5, 1.5, size=(20, 3))
    prediction = Prediction(
        np.full(4, 5), "mc", 8, others={POSITIONS: target + std * noise, STD: std}
    )
    found = nbody_run.measure(prediction, target, bootstrap=20)
    mean, score = prediction.array(POSITIONS), {k: v["value"] for k, v in found.items()}
    assert mean is not None
    assert score["mse"] == pytest.approx(np.mean((std * noise) ** 2))
    assert score["nll"] == pytest.approx(-3 * norm.logpdf(target, mean, std).mean())
    assert score["crps"] == pytest.approx(crps_normal(target, mean, std).mean())
    assert score["crps_sum"] == pytest.approx(3 * score["crps"])
    low, high = found["mse"]["low"], found["mse"]["high"]
    assert low is not None
    assert high is not None
    assert low < score["mse"] < high


def test_test_batches_have_noise_of_their_own(data, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nbody_run, "TEST_BATCH", 1)
    model = nbody_run.build_method(tiny("egnn-blip_local-seed0").settings, seed=0)
    twice = nbody_run.ParticleData(
        *(a[[0, 0]] for a in (data["test"].positions, data["test"].velocities)),
        data["test"].charges[[0, 0]],
        data["test"].targets[[0, 0]],
    )
    std = nbody_run.predict(model, twice, 4, 0).array(STD)
    assert std is not None
    assert not np.allclose(std[:5], std[5:])
    again = nbody_run.predict(model, twice, 4, 0).array(STD)
    np.testing.assert_array_equal(std, again)


def test_methods_of_a_seed_start_from_the_same_backbone():
    settings = tiny("egnn-base-seed0").settings
    models = {
        name: nbody_run.build_method({**settings, "method": method}, seed=1)
        for name, method in nbody.METHODS.items()
        if method["kind"] != "deep_ensemble"
    }
    base = models["base"].state_dict()
    assert isinstance(models["mc_dropout_0.5"], MCDropout)
    assert models["mc_dropout_0.5"].rate == 0.5
    local, flipout = models["blip_local"], models["blip_flipout"]
    assert isinstance(local, BayesianPotential)
    assert isinstance(flipout, BayesianPotential)
    assert (local.estimator, flipout.estimator) == ("local", "flipout")
    assert local.rho == pytest.approx(1.0)
    for model in models.values():
        backbone = getattr(model, "backbone", model)
        for name, tensor in backbone.state_dict().items():
            torch.testing.assert_close(tensor, base[name], rtol=0, atol=0)


def test_profiles():
    paper = nbody.specs("paper")
    assert all(spec.settings["training"]["epochs"] == 10_000 for spec in paper)
    assert all(spec.settings["training"]["lr"] == 5e-4 for spec in paper)
    assert sum(spec.name == "gnn-blip_local" for spec in paper) == 4
    default = [spec.id for spec in nbody.specs("default")]
    assert default[:3] == ["egnn-base-seed0", "egnn-blip_local-seed0", "egnn-blip_flipout-seed0"]
    with pytest.raises(InputError, match="no profile 'tiny'; use one of quick"):
        reproduce("nbody", "tiny")
    with pytest.raises(InputError, match="no study 'gas'"):
        reproduce("gas")
