"""Whole campaigns: stages, targets, executors, failures, resumption."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase.build import molecule
from campaigns import tiny_campaign
from rich.console import Console
from typer.testing import CliRunner

from blips.active import auto, campaign_summary, load_campaign, run_campaign
from blips.active.campaign import Campaign, initial_picks
from blips.active.candidates import Pool
from blips.active.config import ExecutorConfig
from blips.active.database import CampaignError
from blips.active.display import CampaignDisplay
from blips.active.executor import InlineExecutor, make_executor
from blips.active.select import screen_candidates
from blips.active.store import CampaignStore
from blips.active.training import errors_on, force_mae_bound
from blips.cli import app
from blips.errors import ConfigError, InputError
from blips.train.released import load_once


def rattled(count, seed, scale=0.1):
    rng = np.random.default_rng(seed)
    frames = []
    for _ in range(count):
        atoms = molecule("NH3")
        atoms.positions += rng.normal(scale=scale, size=(4, 3))
        frames.append(atoms)
    return frames


def labels_of(summary):
    return [
        (p["name"], p["atoms"].positions.tolist(), p["atoms"].get_potential_energy())
        for p in summary["picks"]
        if p["status"] == "labelled"
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished campaign, inline."""
    folder = tmp_path_factory.mktemp("finished")
    test = rattled(4, 1)
    from ase.calculators.emt import EMT
    from ase.calculators.singlepoint import SinglePointCalculator

    for atoms in test:
        atoms.calc = EMT()
        atoms.calc = SinglePointCalculator(
            atoms, energy=atoms.get_potential_energy(), forces=atoms.get_forces()
        )
    ase.io.write(folder / "test.extxyz", test)
    config = tiny_campaign(folder)
    config["evaluate"] = {"structures": str(folder / "test.extxyz")}
    return config, run_campaign(load_campaign(config), display=False)


def test_the_summary_tells_the_story(finished):
    config, summary = finished
    assert summary["ended"] == "2 rounds are done"
    assert (summary["labels"], summary["open"], summary["quarantined"]) == (12, 0, 0)
    assert [point["labels"] for point in summary["curve"]] == [6, 9, 12]
    assert all(point["force_mae"] > 0 for point in summary["curve"])
    assert [entry["chosen"] for entry in summary["rounds"]] == [6, 3, 3]
    last = summary["picks"][-1]
    assert last["reason"]["rule"] == "expected_reduction"
    assert {"walker", "temperature", "step"} <= last["reason"]["origin"].keys()
    assert last["score"] == last["reason"]["scores"]["expected_reduction"]
    assert campaign_summary(config["folder"])["labels"] == 12
    json.dumps({k: v for k, v in summary.items() if k != "picks"})


def test_the_report_shows_what_was_picked_in_3d(finished, tmp_path):
    from blips.report import write_report

    config, summary = finished
    page = write_report(config["folder"], tmp_path / "report.html", baseline=config["folder"])
    text = page.read_text()
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert [one["name"] for one in data["sets"]] == ["round 2", "round 1"]
    shown = data["sets"][1]["structures"]
    picks = {pick["name"]: pick for pick in summary["picks"] if pick["round"] == 1}
    assert {entry["index"] for entry in shown} == picks.keys()
    for entry in shown:  # the std that it was picked for, and the error that its label showed
        score = picks[entry["index"]]["reason"]["scores"]["force_std"]
        assert entry["std_max"] == pytest.approx(score, rel=1e-3)
    worst = max(shown, key=lambda entry: entry["std_max"])
    path = f"{config['folder']}/{summary['curve'][0]['model']}"
    model = load_once(path)
    atoms = picks[worst["index"]]["atoms"]
    select = load_campaign(config).select
    found = model.predict(atoms, samples=select.samples, method=select.method)
    error = np.linalg.norm(found.forces - atoms.get_forces(), axis=1)
    np.testing.assert_allclose(worst["error"], error, rtol=1e-2)
    assert "Picks in 3D" in text
    assert "The baseline (expected_reduction) ended at" in text
    with pytest.raises(InputError, match="no campaign"):
        write_report(tmp_path, tmp_path / "x.html", baseline=tmp_path)


def test_a_finished_campaign_stays_as_it_is_and_goes_on_with_a_larger_budget(finished, tmp_path):
    import shutil

    config, summary = finished
    shutil.copytree(config["folder"], tmp_path / "copy")
    config = {**config, "folder": str(tmp_path / "copy")}
    assert labels_of(run_campaign(load_campaign(config), display=False)) == labels_of(summary)
    more = run_campaign(load_campaign(config, "stop.rounds=3"), display=False)
    assert labels_of(more)[:12] == labels_of(summary)
    assert (summary["labels"], more["labels"]) == (12, 15)


def test_a_lost_model_is_trained_again(finished, tmp_path):
    import shutil

    config, summary = finished
    shutil.copytree(config["folder"], tmp_path / "copy")
    config = {**config, "folder": str(tmp_path / "copy")}
    shutil.rmtree(tmp_path / "copy" / "models")
    more = run_campaign(load_campaign(config, "stop.rounds=3"), display=False)
    assert labels_of(more)[:12] == labels_of(summary)


def test_failures_are_set_aside_and_the_campaign_goes_on(tmp_path):
    options = {"trouble": "raise", "below": 0.0}
    config = tiny_campaign(
        tmp_path,
        label={"calculator": "counting.Troubled", "options": options, "trust": True, "retries": 1},
        stop={"rounds": 1},
    )
    summary = run_campaign(load_campaign(config), display=False)
    failed = [p for p in summary["picks"] if p["status"] == "quarantined"]
    assert failed
    assert summary["labels"] + len(failed) == 9
    assert all(len(p["log"]) == 2 and "not amused" in p["log"][1] for p in failed)


def test_a_campaign_without_any_label_stops(tmp_path):
    options = {"trouble": "raise", "below": 100.0}
    config = tiny_campaign(
        tmp_path,
        label={"calculator": "counting.Troubled", "options": options, "trust": True, "retries": 0},
    )
    with pytest.raises(CampaignError, match=r"(?s)none of the first structures.*not amused"):
        run_campaign(load_campaign(config), display=False)


def test_a_target_error_ends_a_campaign(finished, tmp_path):
    config, summary = finished
    first, second = (point["force_mae"] for point in summary["curve"][:2])
    config = {**config, "folder": str(tmp_path / "target")}
    summary = run_campaign(load_campaign(config, f"stop.force_mae={1.01 * first}"), display=False)
    assert summary["labels"] == 6
    assert summary["ended"] == f"force MAE {first:.3g} eV/A reached the target {1.01 * first:g}"
    target = 0.99 * min(first, second)
    summary = run_campaign(
        load_campaign(config, f"stop.force_mae={target}", "stop.rounds=1"), display=False
    )
    assert summary["labels"] == 9  # not reached: it went on
    assert summary["ended"] == "1 rounds are done"


def test_the_bound_covers_new_errors_as_often_as_it_says():
    """Errors in proportion to the std, by whatever law: a new one is below its bound."""
    rng = np.random.default_rng(0)
    held = []
    for _ in range(2000):
        ratios = sorted(rng.lognormal(size=19))
        held.append(rng.lognormal() * 0.3 <= force_mae_bound(ratios, 0.3, 0.9))
    assert np.mean(held) == pytest.approx(0.9, abs=0.02)
    assert force_mae_bound([1.0] * 8, 0.3, 0.9) is None  # too few labels for so much confidence
    assert force_mae_bound([*[1.0] * 8, 5.0], 0.3, 0.9) == pytest.approx(1.5)


def test_a_campaign_without_a_test_set_ends_when_its_bound_reaches_the_target(tmp_path):
    config = tiny_campaign(tmp_path, stop={"confidence": 0.5})
    summary = run_campaign(load_campaign(config), display=False)
    first, second = summary["rounds"][1:]
    assert first["force_mae_bound"] is None  # nothing was foreseen yet
    bound = second["force_mae_bound"]
    assert bound > 0
    config = {**config, "folder": str(tmp_path / "again")}
    target = 1.01 * bound
    short = run_campaign(load_campaign(config, f"stop.force_mae={target}"), display=False)
    assert f"below {bound:.3g} eV/A with 50 % confidence" in short["ended"]
    assert short["labels"] == 9
    more = run_campaign(load_campaign(config), display=False)  # without the target it goes on
    assert labels_of(more) == labels_of(summary)


def test_targets_and_budget_end_a_campaign(tmp_path):
    config = tiny_campaign(tmp_path, stop={"labels": 7})
    summary = run_campaign(load_campaign(config), display=False)
    assert summary["labels"] == 7
    assert summary["ended"] == "the budget of 7 labels is spent"
    config = {**config, "folder": str(tmp_path / "certain"), "stop": {"force_std": 1e3}}
    summary = run_campaign(load_campaign(config), display=False)
    assert summary["labels"] == 6
    assert "no candidate is less certain" in summary["ended"]
    more = run_campaign(
        load_campaign(config, "stop.force_std=null", "stop.rounds=1"), display=False
    )
    assert more["labels"] == 9


@pytest.mark.parametrize("rule", ["energy_std", "force_std", "expected_reduction", "random"])
def test_every_rule_chooses_from_a_pool(tmp_path, rule):
    ase.io.write(tmp_path / "pool.extxyz", [*rattled(20, 3), *rattled(2, 4, scale=3.0)])
    config = tiny_campaign(tmp_path, select={"rule": rule}, stop={"rounds": 1})
    config["explore"] = {"kind": "pool", "pool": str(tmp_path / "pool.extxyz")}
    summary = run_campaign(load_campaign(config), display=False)
    picks = [p for p in summary["picks"] if p["round"] == 1]
    frames = {p["reason"]["origin"]["frame"] for p in picks}
    assert len(frames) == 3
    assert frames <= set(range(22))
    assert summary["rounds"][1]["seen"] == 22
    assert all(np.isfinite(p["score"]) for p in picks)


def test_a_campaign_is_judged_by_the_labels_that_it_asks_for(finished, tmp_path):
    """By the model that asked, before it has seen them; also where there is a test set."""
    config, summary = finished
    first, second, last = summary["curve"]
    assert last["surprise"] == {}  # the campaign ended: nothing was labelled after the last model
    path = f"{config['folder']}/{second['model']}"
    asked = [pick["atoms"] for pick in summary["picks"] if pick["round"] == 2]
    expected = errors_on(load_once(path), asked, load_campaign(config))
    assert second["surprise"] == expected
    assert first["surprise"]["structures"] == 3

    console = Console(file=io.StringIO(), record=True, width=100, _environ={})
    display = CampaignDisplay("campaign", console)
    config = tiny_campaign(tmp_path, stop={"rounds": 1})
    with CampaignStore(config["folder"]) as store, display:
        settings = load_campaign(config)
        store.begin(settings)
        Campaign(store, settings, InlineExecutor(), display).run()
        shown = store.read("surprise", 1)
    assert f"{shown['force_mae']:.4g}" in console.export_text()


def test_labels_choose_the_rule_where_it_is_auto(tmp_path):
    """The default before there are labels to judge by; then what the store says of them."""
    changes = {"select": {"rule": "auto", "batch": 6}, "explore": {"steps": 40}}
    config = tiny_campaign(tmp_path, stop={"rounds": 1}, **changes)
    summary = run_campaign(load_campaign(config), display=False)
    trial = summary["curve"][0]["surprise"]["trial"]
    assert summary["rounds"][1]["rule"] == "expected_reduction"
    assert {len(values) for values in trial.values()} == {auto.SPLITS}
    assert any(np.std(values) > 0 for values in trial.values())
    against = {rule: [1.0, 1.1] for rule in auto.RULES} | {"random": [0.0, 0.0]}
    with CampaignStore(config["folder"]) as store:
        store.write("surprise", {**store.read("surprise", 1), "trial": against}, 1)
    more = tiny_campaign(tmp_path, stop={"rounds": 2}, **changes)
    summary = run_campaign(load_campaign(more), display=False)
    rules = [entry.get("rule") for entry in summary["rounds"]]
    assert rules == [None, "expected_reduction", "random"]
    assert {p["reason"]["rule"] for p in summary["picks"] if p["round"] == 2} == {"random"}


def test_ctrl_c_says_how_to_go_on(tmp_path):
    """A real one, during labelling; the same command ends the campaign."""
    import yaml

    calls = tmp_path / "calls.txt"
    options = {"file": str(calls), "seconds": 1.0}
    config = tiny_campaign(
        tmp_path,
        initial={"count": 4},
        label={"calculator": "counting.Counting", "options": options, "trust": True},
        stop={"rounds": 0},
    )
    path = tmp_path / "my campaign.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-c", "from blips.cli import app; app()", "active", str(path)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not calls.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert f"every finished label is safe in {config['folder']}" in said
    assert f"blips active '{path}'" in said
    assert "Traceback" not in said
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert "4 labels, 0 set aside; 0 rounds are done" in again.stdout
    assert len(calls.read_text().splitlines()) == 4  # none was computed again


def test_a_pool_that_was_labelled_is_not_offered_again(tmp_path):
    ase.io.write(tmp_path / "pool.extxyz", rattled(9, 3))
    config = tiny_campaign(tmp_path, stop={"rounds": 3})
    config["initial"] = {**config["initial"], "structures": str(tmp_path / "pool.extxyz")}
    config["initial"]["displacement"] = 0.0
    config["explore"] = {"kind": "pool", "pool": str(tmp_path / "pool.extxyz")}
    config["limits"] = {"force": None, "closest": None}
    summary = run_campaign(load_campaign(config), display=False)
    assert summary["labels"] == 9
    assert summary["ended"] == "all 9 candidates were thrown out ({'known': 9})"


@pytest.mark.slow
def test_two_workers_screen_as_one(finished, tmp_path):
    config, _ = finished
    ase.io.write(tmp_path / "pool.extxyz", rattled(40, 5))
    model = Path(config["folder"]) / "models/round-0001/model.safetensors"
    settings = load_campaign(config, "select.chunk=4")
    found = []
    for number, executor in enumerate(
        (
            ExecutorConfig(kind="inline"),
            ExecutorConfig(kind="local", workers=1, processes=False),
            ExecutorConfig(kind="local", workers=2),
        )
    ):
        with (
            CampaignStore(tmp_path / str(number)) as store,
            make_executor(executor) as running,
        ):
            pool = Pool(tmp_path / "pool.extxyz")
            found.append(screen_candidates(pool, model, settings, store, running, 1, None))
    assert found[0].seen == 40
    for other in found[1:]:
        for name in ("rows", "seen", "excluded", "largest", "mean_std"):
            assert getattr(other, name) == getattr(found[0], name)


def test_initial_structures_depend_on_the_seed(tmp_path):
    config = tiny_campaign(tmp_path)
    first, again = (initial_picks(load_campaign(config)) for _ in range(2))
    other = initial_picks(load_campaign(config, "seed=1"))
    for a, b in zip(first, again, strict=True):
        assert np.array_equal(a.atoms.positions, b.atoms.positions)
    assert not np.array_equal(first[0].atoms.positions, other[0].atoms.positions)
    with pytest.raises(ConfigError, match=r"fewer than initial.count"):
        initial_picks(load_campaign(config, "initial.displacement=0"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("explore.temperature=[300]", r"'explore.temperature'; did you mean 'temperatures'\?"),
        ("explore.kind=pool", "explore.pool names no file"),
        ({"label": {"calculator": "my.package.Class"}}, "set label.trust"),  # as of a file
        ("model.bayes.enabled=false", "needs error bars"),
        ("limits.forces=1", "did you mean"),
        ("limits.force_std=-1", "should be greater than 0"),
        ("select.rule=information training.condition=false", "needs the conditioned posterior"),
    ],
)
def test_mistakes_in_the_configuration_are_named(tmp_path, change, message):
    changes = change.split() if isinstance(change, str) else [change]
    with pytest.raises(ConfigError, match=message):
        load_campaign(tiny_campaign(tmp_path), *changes)


def test_the_command_runs_a_campaign(tmp_path):
    import yaml

    path = tmp_path / "campaign.yaml"
    path.write_text(yaml.safe_dump(tiny_campaign(tmp_path)))
    result = CliRunner().invoke(app, ["active", str(path), "stop.rounds=0"])
    assert result.exit_code == 0, result.output
    assert "6 labels, 0 set aside; 0 rounds are done" in result.output


def test_batch_systems_take_the_same_configuration(tmp_path):
    pytest.importorskip("dask_jobqueue")
    from blips.active.executor import make_cluster

    for kind, directive in (("slurm", "#SBATCH -p fast"), ("pbs", "#PBS -q fast")):
        config = ExecutorConfig(kind=kind, queue="fast", shared_folder=str(tmp_path), workers=1)
        with make_cluster(config.model_copy(update={"workers": 0})) as cluster:
            script = cluster.job_script()
        assert directive in script
        assert "export OMP_NUM_THREADS=1" in script
