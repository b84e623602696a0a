from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.morse import MorsePotential
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from rich.console import Console
from typer.testing import CliRunner

from blips.baselines import DeepEnsemble
from blips.errors import ConfigError, InputError
from helpers import TINY, quartz
from studies.__main__ import app
from studies.reproduce import reproduce
from studies.runner import _check, _sort_out
from studies.silica import data as silica_data
from studies.silica import run as silica_run
from studies.silica import study as silica
from studies.spec import Layout, Run, RunSpec

MakeRun = Callable[..., Run]
SIZES = {"train": 4, "valid": 2, "calibration": 3, "known": 3, "new": 3}


def labelled(seed: int) -> Atoms:
    atoms = quartz(rattle=0.1, seed=seed)
    atoms.calc = MorsePotential(epsilon=0.5, r0=1.6, rho0=4.0, rcut1=2.5, rcut2=3.0)
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
    return atoms


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Quartz in place of the zeolites."""
    folder = tmp_path / "data" / "silica"
    folder.mkdir(parents=True)
    for number, name in enumerate(silica_data.FILES.values()):
        write(folder / name, [labelled(10 * number + k) for k in range(6)])
    monkeypatch.setenv("BLIPS_DATA", str(folder.parent))
    return folder


def tiny(name: str, seed: int = 0) -> RunSpec:
    """A run of the quick profile with a small model of random weights."""
    spec = next(s for s in silica.specs("quick") if s.name == f"4-{name}")
    training = {"epochs": 2, "lr": 0.01, "batch_size": 2}
    settings = {
        **spec.settings,
        "model": {"backbone": "painn", "hyperparameters": TINY},
        "training": {**spec.settings["training"], **training},
        "data": SIZES,
        "samples": 3,
        "bootstrap": 5,
    }
    return replace(spec, settings=settings, seed=seed)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def run(spec: RunSpec, **needs: Path) -> Run:
        work = tmp_path / f"{spec.id}-{spec.hash}"
        work.mkdir(exist_ok=True)
        return Run(spec, work, tmp_path / "figures", needs)

    return run


def values(run: Run) -> dict[str, float]:
    found = silica_run.execute(run).metrics
    return {name: float(metric["value"] or 0.0) for name, metric in found.items()}


def test_parts_do_not_overlap(data: Path):
    found = silica_data.load_data(SIZES)
    parts = [found.train, found.valid, found.calibration, *found.tests.values()]
    assert [len(part) for part in parts] == list(SIZES.values())
    positions = [atoms.positions.tobytes() for part in parts for atoms in part]
    assert len(set(positions)) == len(positions)
    with pytest.raises(InputError, match="6 structures; 7 are asked for"):
        silica_data.load_data({**SIZES, "train": 7})


def test_without_data_the_study_says_what_it_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("BLIPS_DATA", raising=False)
    with pytest.raises(InputError, match="BLIPS_DATA"):
        silica.prepare("quick", Console(quiet=True))


@pytest.mark.parametrize("profile", silica.PROFILES)
def test_runs_are_in_order_and_ensembles_reuse_plain_runs(profile: str):
    specs = silica.specs(profile)
    _check(specs)
    count = next(iter(silica.PROFILES[profile].epochs))
    ensemble = next(s for s in specs if s.name == f"{count}-deep_ensemble")
    assert ensemble.needs == tuple(f"{count}-plain-seed{k}" for k in range(4))
    rows = {name for spec in specs for name in [spec.name.split("-")[1]]}
    assert rows == set(silica.METHODS)


def test_a_model_that_is_not_released_is_refused():
    with pytest.raises(ConfigError, match="unknown model 'nothing'"):
        silica.specs("quick", model="nothing")
    spec = silica.specs("quick", model="orb-v3-direct-20-omat", weights="orb.ckpt")[0]
    assert spec.settings["model"] == {"backbone": "orb-v3-direct-20-omat", "weights": "orb.ckpt"}


def test_options_of_a_study():
    with pytest.raises(InputError, match="silica has no option size; it takes model, weights"):
        reproduce("silica", "quick", options={"size": "3"})
    with pytest.raises(InputError, match="nbody has no option model; it takes none"):
        reproduce("nbody", "quick", options={"model": "chgnet"})


def test_options_on_the_command_line():
    def command(option: str) -> None:
        arguments = ["silica", option, "--profile", "quick"]
        CliRunner().invoke(app, arguments, catch_exceptions=False)

    with pytest.raises(ConfigError, match="unknown model 'nothing'"):
        command("model=nothing")
    with pytest.raises(ConfigError, match="cannot read 'chgnet'"):
        command("chgnet")


def test_plain_runs_and_what_is_built_on_them(data: Path, make_run: MakeRun):
    as_released = values(make_run(tiny("pretrained")))
    runs = [make_run(tiny("plain", seed)) for seed in range(2)]
    plain = [values(run) for run in runs]
    assert plain[0]["known_forces_mae"] != plain[1]["known_forces_mae"]
    assert plain[0]["valid_forces_mae"] < as_released["valid_forces_mae"]
    assert not any("ece" in name for name in plain[0])

    folders = {run.spec.id: run.folder for run in runs}
    run = make_run(tiny("deep_ensemble"), **folders)
    model, details = silica_run.finetuned(run, silica_data.load_data(SIZES))
    assert isinstance(model, DeepEnsemble)
    assert details["built_on"] == list(folders)
    together = values(run)
    with np.load(run.folder / "new.npz") as kept:
        error = np.abs(kept["forces"] - kept["forces_ref"]).mean()
    assert together["new_forces_mae"] == pytest.approx(error)

    around = values(make_run(tiny("blip_afterwards"), **{runs[0].spec.id: runs[0].folder}))
    for metric in ("known_forces_mae", "new_atom_energy_mae"):
        assert around[f"{metric}_map"] == pytest.approx(plain[0][metric], rel=1e-4)

    conditioned = values(make_run(tiny("conditioned"), **{runs[0].spec.id: runs[0].folder}))
    for metric in ("known_forces_mae", "new_atom_energy_mae"):  # the plain model's means
        assert conditioned[metric] == pytest.approx(plain[0][metric], rel=1e-6)
    assert 0 < conditioned["new_forces_coverage_90"] <= 1


def test_blip_is_calibrated_on_structures_of_its_own(data: Path, make_run: MakeRun, tmp_path: Path):
    spec = tiny("blip")
    run = make_run(spec)
    found = silica_run.execute(run)
    metrics = {name: float(metric["value"] or 0.0) for name, metric in found.metrics.items()}
    factor = found.details["calibration"]["forces"]["factor"]
    for test in silica_data.TESTS:
        calibrated = metrics[f"{test}_forces_zms_calibrated"]
        assert calibrated == pytest.approx(metrics[f"{test}_forces_zms"] / factor**2)
        assert f"{test}_atom_spearman_calibrated" not in metrics
    assert metrics.keys() >= {c.metric for t in silica_data.TESTS for c in silica._columns(t)}

    frozen = silica_run.execute(make_run(tiny("blip_frozen"), **{spec.id: run.folder})).metrics
    for metric in ("known_forces_mae_map", "new_forces_mae_map"):
        assert frozen[metric] == found.metrics[metric]
    assert frozen["new_forces_rms_std"] != found.metrics["new_forces_rms_std"]

    # The table has means and samples in rows of their own, for both tests.
    layout = Layout.of("silica", "quick", tmp_path / "results", tmp_path / "runs")
    layout.results.mkdir(parents=True)
    write_result(layout, spec, found.metrics)
    lines = silica.table([spec], layout).markdown().splitlines()
    means = next(line for line in lines if line.startswith("| new | 4 | BLIP, MAP | 1 |"))
    samples = next(line for line in lines if line.startswith("| new | 4 | BLIP, sample mean"))
    assert means.split("|")[6].strip() == f"{1e3 * metrics['new_forces_mae_map']:.1f}"
    assert samples.split("|")[6].strip() == f"{1e3 * metrics['new_forces_mae']:.1f}"
    silica.draw([spec], layout)
    assert (layout.figures / "errors.png").stat().st_size > 1000


def write_result(layout: Layout, spec: RunSpec, metrics: dict) -> None:
    import json

    content = {"hash": spec.hash, "metrics": metrics}
    layout.result_file(spec).write_text(json.dumps(content))
    assert _sort_out([spec], layout)[0].reused == [spec.id]


def test_a_posterior_around_a_model_of_many_structures_is_trained_on_some_of_them():
    sizes = {spec.id: spec.settings["data"] for spec in silica.specs("default")}
    assert sizes["1024-blip_afterwards-seed0"]["afterwards"] == silica.AFTERWARDS_STRUCTURES
    assert "afterwards" not in sizes["128-blip_afterwards-seed0"] | sizes["1024-plain-seed0"]
