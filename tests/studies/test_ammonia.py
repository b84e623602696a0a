import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.stats import norm
from scoringrules import crps_normal

from blips.backbones import PaiNN
from blips.baselines import DeepEnsemble
from blips.data.ammonia import load_ammonia
from blips.errors import ConfigError, InputError
from blips.potential import BayesianPotential
from blips.prediction import Prediction
from blips.units import KCAL_PER_MOL
from blips.uq.assess import References
from blips.uq.metrics import spearman
from studies.ammonia import data as ammonia_data
from studies.ammonia import run as ammonia_run
from studies.ammonia import study as ammonia
from studies.reproduce import reproduce
from studies.runner import _check
from studies.spec import Layout, Run, RunSpec

MakeRun = Callable[..., Run]
TRAINED = [name for name, method in ammonia.METHODS.items() if method.built_on is None]


@pytest.fixture(autouse=True)
def shipped_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("BLIPS_DATA", raising=False)


def tiny(name: str, seed: int = 0) -> RunSpec:
    """A run of the quick profile, smaller still."""
    spec = next(s for s in ammonia.specs("quick") if s.name == f"shipped-{name}")
    settings = dict(spec.settings)
    settings["data"] = {"set": "shipped", "train": 4, "valid": 4, "test": 5}
    settings["training"] = settings["training"] | {"epochs": 2, "batch_size": 4}
    settings |= {"samples": 3, "bootstrap": 5}
    return replace(spec, settings=settings, seed=seed)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def run(spec: RunSpec, **needs: Path) -> Run:
        work = tmp_path / f"{spec.id}-{spec.hash}"
        work.mkdir(exist_ok=True)
        return Run(spec, work, tmp_path / "figures", needs)

    return run


def test_a_trained_model_and_its_frozen_committee(tmp_path: Path):
    outcome = reproduce(
        "ammonia",
        "quick",
        only=["blip_local_paper_frozen"],
        folder=tmp_path / "results",
        runs=tmp_path / "runs",
        console=Console(quiet=True),
    )
    assert outcome.failed == {}
    ids = ["shipped-blip_local_paper-seed0", "shipped-blip_local_paper_frozen-seed0"]
    assert outcome.finished == ids
    layout = Layout.of("ammonia", "quick", tmp_path / "results", tmp_path / "runs")
    mc, frozen = (json.loads((layout.results / f"{name}.json").read_text()) for name in ids)
    assert frozen["details"]["built_on"] == ids[:1]
    for name in ("energy_mae_map", "forces_mae_map"):
        assert frozen["metrics"][name] == mc["metrics"][name]
    assert frozen["metrics"]["forces_ece"] != mc["metrics"]["forces_ece"]
    assert {path.name for path in layout.figures.iterdir()} == {
        f"{name}-{figure}.png" for name in ids for figure in ("std_error", "reliability")
    }
    text = (layout.results / "table.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| shipped | BLIP, local (p"))
    energy, forces = (mc["metrics"][f"{name}_mae"]["value"] for name in ("energy", "forces"))
    start = f"| shipped | BLIP, local (paper) | 1 | {energy:.2f} | 11.51 ± 0.75 | {forces:.2f} |"
    assert row.startswith(start)
    assert "other geometries" in text


@pytest.mark.parametrize("name", TRAINED)
def test_every_trained_method_gives_its_metrics(name: str, make_run: MakeRun):
    run = make_run(tiny(name))
    found = ammonia_run.execute(run)
    metrics = {name: float(metric["value"] or 0.0) for name, metric in found.metrics.items()}
    assert found.details["epochs"] == 2
    assert metrics["forces_mae"] > 1  # kcal/mol/A, after two epochs
    if name == "base":
        assert not any("ece" in metric for metric in metrics)
        return
    factor = found.details["calibration"]["forces"]["factor"]
    assert metrics["forces_zms_calibrated"] == pytest.approx(metrics["forces_zms"] / factor**2)
    assert metrics["forces_rms_std_calibrated"] == pytest.approx(metrics["forces_rms_std"] * factor)
    assert metrics.keys() >= {c.metric for c in ammonia.COLUMNS}
    assert "atom_spearman_calibrated" not in metrics
    assert ("forces_mae_map" in metrics) == name.startswith("blip")
    with np.load(run.folder / "test.npz") as kept:
        error = kept["forces_ref"] - kept["forces"]
    assert np.abs(error).mean() == pytest.approx(metrics["forces_mae"])


def test_methods_built_on_the_base_runs(make_run: MakeRun):
    bases = [make_run(tiny("base", seed)) for seed in range(2)]
    mae = [ammonia_run.execute(run).metrics["forces_mae"]["value"] for run in bases]
    folders = {run.spec.id: run.folder for run in bases}
    first = {bases[0].spec.id: bases[0].folder}
    for name in ("llpr", "gmm", "conditioned"):
        spec = tiny(name)
        assert spec.needs == tuple(first)
        found = ammonia_run.execute(make_run(spec, **first))
        assert found.metrics["forces_mae"]["value"] == pytest.approx(mae[0], rel=1e-5)
    ece = found.metrics["forces_ece"]  # pyright: ignore[reportPossiblyUnboundVariable]
    assert ece == found.metrics["forces_ece_calibrated"]  # it is scaled on validation data already
    spec = tiny("deep_ensemble")
    assert spec.needs == tuple(folders)
    run = make_run(spec, **folders)
    data = ammonia_data.load_data(spec.settings["data"])
    ensemble, _ = ammonia_run.trained(run, data)
    assert isinstance(ensemble, DeepEnsemble)
    assert len(ensemble.models) == 2
    assert ammonia_run.execute(run).metrics.keys() >= {c.metric for c in ammonia.COLUMNS}
    with pytest.raises(ConfigError, match="'frozen' cannot be made of shipped-base-seed0"):
        ammonia_run.trained(make_run(tiny("blip_flipout_frozen"), **first), data)


def test_nothing_depends_on_the_test_labels_but_the_metrics(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
):
    spec = tiny("blip_flipout")
    before = ammonia_run.execute(make_run(spec))
    data = ammonia_data.load_data(spec.settings["data"])
    for atoms in data.test:
        assert atoms.calc is not None
        atoms.calc.results["forces"] = -3.0 * atoms.calc.results["forces"]
    monkeypatch.setattr(ammonia_run, "load_data", lambda settings: data)
    after = ammonia_run.execute(make_run(replace(spec, name="again")))
    assert after.details == before.details
    assert after.metrics["forces_mae"] != before.metrics["forces_mae"]
    assert after.metrics["forces_rms_std"]["value"] == before.metrics["forces_rms_std"]["value"]


def test_metrics_have_the_stated_definitions_and_units():
    references = References.of(load_ammonia("test_ood")[:10])
    rng = np.random.default_rng(0)
    assert references.energy is not None
    assert references.forces is not None
    target = references.forces / KCAL_PER_MOL
    std = rng.uniform(0.5, 3.0, size=target.shape)  # kcal/mol/A
    mean = target + std * rng.normal(size=target.shape)
    prediction = Prediction(
        references.n_atoms,
        "mc",
        8,
        energy=references.energy + KCAL_PER_MOL,
        energy_std=np.full(10, KCAL_PER_MOL),
        forces=mean * KCAL_PER_MOL,
        forces_std=std * KCAL_PER_MOL,
    )
    found = ammonia_run.measure(prediction, references, bootstrap=20)
    score = {name: metric["value"] for name, metric in found.items()}
    assert score["energy_mae"] == pytest.approx(1.0)
    assert score["forces_mae"] == pytest.approx(np.abs(mean - target).mean())
    assert score["forces_nll"] == pytest.approx(-3 * norm.logpdf(target, mean, std).mean())
    assert score["forces_crps"] == pytest.approx(crps_normal(target, mean, std).mean())
    variance, error = (std**2).sum(1), ((mean - target) ** 2).sum(1)
    assert score["atom_spearman"] == pytest.approx(spearman(variance, error))
    by_structure = variance.reshape(10, 4).mean(1), error.reshape(10, 4).mean(1)
    assert score["structure_spearman"] == pytest.approx(spearman(*by_structure))


def test_copies_are_recognised_and_left_out():
    known = load_ammonia("train")
    copy, mirrored, moved = (known[k].copy() for k in range(3))
    copy.rotate(70, "xyz", center="COM")
    copy = copy[[3, 1, 0, 2]]
    mirrored.positions[:, 0] *= -1
    moved.positions[1] *= 1.02
    assert ammonia_data.without_copies([copy, mirrored, moved], known) == [moved]


def test_turned_molecules_keep_their_energy_surface():
    before = load_ammonia("test_ood")
    after = ammonia_data.turned(before)
    for old, new in zip(before[:20], after[:20], strict=True):
        assert new.get_potential_energy() == pytest.approx(old.get_potential_energy())
        np.testing.assert_allclose(new.get_all_distances(), old.get_all_distances(), atol=1e-9)
        work_old, work_new = (a.positions @ a.get_forces().T for a in (old, new))
        np.testing.assert_allclose(work_new, work_old, atol=1e-9)
    smallest = [
        min(np.abs(atoms.get_forces()).min() for atoms in atoms_list)
        for atoms_list in (before, after)
    ]
    assert smallest[0] == 0
    assert smallest[1] > 1e-4  # eV/A
    again = ammonia_data.turned(before)
    np.testing.assert_array_equal(again[7].positions, after[7].positions)


def test_data_sets(reference_data: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = ammonia.SIZES
    shipped = ammonia_data.load_data({"set": "shipped", **sizes})
    assert [len(part) for part in (shipped.train, shipped.valid, shipped.test)] == [64, 14, 129]
    with pytest.raises(InputError, match="BLIPS_DATA"):
        ammonia_data.load_data({"set": "public", **sizes})
    assert {spec.settings["data"]["set"] for spec in ammonia.specs("default")} == {"shipped"}

    monkeypatch.setenv("BLIPS_DATA", str(reference_data))
    public = ammonia_data.load_data({"set": "public", **sizes})
    assert [len(part) for part in (public.train, public.valid, public.test)] == [64, 9, 30]
    assert {spec.settings["data"]["set"] for spec in ammonia.specs("default")} == {
        "shipped",
        "public",
    }


def test_methods_of_a_seed_start_from_the_same_backbone():
    models = {name: ammonia_run.build_method(tiny(name).settings, seed=1) for name in TRAINED}
    base = models["base"]
    assert isinstance(base, PaiNN)
    for model in models.values():
        backbone = getattr(model, "backbone", model)
        for name, tensor in backbone.state_dict().items():
            torch.testing.assert_close(tensor, base.state_dict()[name], rtol=0, atol=0)
    local, flipout = models["blip_local_paper"], models["blip_flipout"]
    assert isinstance(local, BayesianPotential)
    assert isinstance(flipout, BayesianPotential)
    assert (local.estimator, flipout.estimator) == ("local", "flipout")
    mixing = {f"blocks.{k}.update.mixing" for k in range(3)}
    assert flipout.conversion.roles.keys() - local.conversion.roles.keys() == mixing
    with pytest.raises(ConfigError, match="'llpr' is not trained; use one of base, blip"):
        ammonia_run.build_method(tiny("llpr").settings, seed=0)


def test_profiles():
    for profile in ammonia.PROFILES:
        _check(ammonia.specs(profile))
    default = ammonia.specs("default")
    assert [spec.id for spec in default[:6]] == [
        f"shipped-{name}-seed0"
        for name in (
            "base",
            "blip_beyond",
            "blip_afterwards",
            "blip_flipout",
            "blip_local_paper",
            "llpr",
        )
    ]
    counts = {name: sum(s.name == f"shipped-{name}" for s in default) for name in ammonia.METHODS}
    assert counts.pop("base") == 5
    assert counts.pop("deep_ensemble") == 1
    assert set(counts.values()) == {3}
    by_id = {spec.id: spec.settings for spec in ammonia.specs("paper")}
    paper, flipout = by_id["shipped-blip_local_paper-seed3"], by_id["shipped-blip_flipout-seed0"]
    training = paper["training"]
    assert (training["epochs"], training["batch_size"], training["kl_weight"]) == (500, 64, 10)
    assert paper["hyperparameters"]["features"] == 128
    assert flipout["training"]["kl_weight"] == 3
    of_default = {spec.id: spec.settings for spec in default}
    frozen = of_default["shipped-blip_flipout_crps_frozen-seed0"]
    assert frozen["training"] == of_default["shipped-blip_flipout_crps-seed0"]["training"]
    assert frozen["training"]["loss"] == "crps"
    ensembles = [spec for spec in ammonia.specs("paper") if spec.name == "shipped-deep_ensemble"]
    members = [name for ensemble in ensembles for name in ensemble.needs]
    assert (len(ensembles), len(members), len(set(members))) == (4, 20, 20)
