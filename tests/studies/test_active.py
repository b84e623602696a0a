"""The study of active learning, with a small budget."""

import numpy as np
import pytest
import torch
from rich.console import Console

import blips
from blips.active.config import load_campaign
from blips.active.frames import digest
from blips.active.summary import labels_to_reach
from blips.backbones import PaiNN
from blips.inference.sampling import Member
from helpers import TINY, morse_ammonia
from studies.active import study as active
from studies.active.data import SETS
from studies.active.step import step
from studies.errorbars.data import data_folder
from studies.reproduce import reproduce
from studies.spec import Layout


def curve(*errors):
    return [{"labels": 20 + 10 * n, "force_mae": error} for n, error in enumerate(errors)]


def test_labels_to_reach_an_error():
    assert labels_to_reach(curve(0.4, 0.2, 0.1), 0.3) == pytest.approx(25)
    assert labels_to_reach(curve(0.4, 0.2, 0.1), 0.4) == 20
    assert labels_to_reach(curve(0.4, 0.2, 0.1), 0.05) == 40  # never: all of them
    assert labels_to_reach(curve(0.4, 0.1, 0.2), 0.15) == pytest.approx(20 + 250 / 30)


def test_labels_to_reach_an_error_of_energies():
    points = [{"labels": 10, "energy_mae": 3.0}, {"labels": 20, "energy_mae": 1.0}]
    assert labels_to_reach(points, 2.0, "energy_mae") == pytest.approx(15)


@pytest.mark.parametrize("profile", active.PROFILES)
def test_campaigns_of_a_pool_and_seed_differ_in_their_rule_alone(profile):
    size = active.PROFILES[profile]
    specs = {spec.id: spec for spec in active.specs(profile)}
    assert len(specs) == size.seeds * len(size.sets) * len(size.rules)
    for seed in range(size.seeds):
        for data in size.sets:
            found = [specs[f"{data}-{rule}-seed{seed}"].settings for rule in size.rules]
            campaigns = [dict(settings["campaign"]) for settings in found]
            rules = [dict(one.pop("select")).pop("rule") for one in campaigns]
            assert tuple(rules) == size.rules
            assert all(one == campaigns[0] for one in campaigns)
            load_campaign(campaigns[0], {"initial": {"structures": "x"}, "explore": {"pool": "x"}})


@pytest.mark.parametrize("name", SETS)
def test_pools_and_test_sets_have_nothing_in_common(name):
    if name not in ("nh3", "xtb") and data_folder() is None:
        pytest.skip("set BLIPS_DATA to a folder with the public data")
    pool, test = SETS[name]()
    assert len(test) >= 40
    assert not {digest(atoms) for atoms in pool} & {digest(atoms) for atoms in test}
    if name == "si":
        groups = [{atoms.info["group"] for atoms in part} for part in (pool, test)]
        assert groups[0] == groups[1] >= {"Surface", "Vacancy"}


def test_random_with_twice_the_labels_is_the_control():
    """The largest numbers of labels of which one is twice the other: 20 and 40 of 10 to 50."""
    at = zip((10, 20, 30, 40, 50), (8.0, 4.0, 3.0, 1.0, 0.9), strict=True)
    points = [{"labels": n, "force_mae": e, "energy_mae": 2 * e} for n, e in at]
    random = {"curve": points}
    found = active._compared(random, random)
    assert found["force_mae_twice"]["value"] == found["energy_mae_twice"]["value"] == 0.25
    assert found["force_mae_fraction"]["value"] == 1
    assert "force_mae_ratio" not in found
    half = {"curve": [{**p, "force_mae": p["force_mae"] / 2} for p in points]}
    found = {name: one["value"] for name, one in active._compared(half, random).items()}
    assert found["force_mae_ratio"] == 0.5
    assert found["force_mae_better"] == 1
    assert found["force_mae_fraction"] == pytest.approx(36 / 50)  # 0.9 of 1.5 (30) to 0.5 (40)
    assert found["energy_mae_better"] == 0
    assert found["energy_mae_fraction"] == 1
    shorter = active._compared({"curve": points[1:3]}, {"curve": points[1:3]})
    assert "force_mae_twice" not in shorter


def test_a_step_of_the_mean_brings_it_nearer_to_the_labels_that_it_was_given():
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(**TINY), seed=0)
    potential.condition(morse_ammonia(4, seed=0), valid=morse_ammonia(4, seed=1))
    labelled = morse_ammonia(8, seed=2)
    noise = step(potential, labelled)
    assert noise is not None
    forces = np.concatenate([atoms.get_forces() for atoms in labelled])
    plain = potential.predict(labelled, method="map").array("forces")
    moved = Member(potential, noise).predict(labelled).array("forces")
    assert np.abs(moved - forces).mean() < 0.7 * np.abs(plain - forces).mean()


@pytest.mark.slow
def test_the_study_runs(tmp_path):
    """A random and an informed campaign with the same first labels; table and figure."""
    done = reproduce(
        "active",
        "quick",
        workers=1,
        folder=tmp_path / "results",
        runs=tmp_path / "runs",
        console=Console(quiet=True),
    )
    assert not done.failed
    layout = Layout.of("active", "quick", tmp_path / "results", tmp_path / "runs")
    found = [layout.read(spec) for spec in active.specs("quick")]
    random, informed = (result["details"] for result in found if result is not None)
    for one in (random, informed):
        assert [point["labels"] for point in one["curve"]] == [6, 10]
    first, other = ([pick["frame"] for pick in one["picks"]] for one in (random, informed))
    assert first[:6] == other[:6]
    assert first[6:] != other[6:]
    assert random["curve"][0]["force_mae"] == informed["curve"][0]["force_mae"]
    table = (layout.results / "table.md").read_text()
    assert "| nh3 | random | 1 |" in table
    assert "| nh3 | information | 1 |" in table
    assert (layout.figures / "errors.png").stat().st_size > 10_000
