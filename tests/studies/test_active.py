"""The worked example of active learning, with a small budget."""

import pytest
from rich.console import Console

from blips.active.summary import labels_to_reach
from studies.active import study as active
from studies.reproduce import reproduce
from studies.spec import Layout


def curve(*errors):
    return [{"labels": 20 + 10 * n, "force_mae": error} for n, error in enumerate(errors)]


def test_labels_to_reach_an_error():
    assert labels_to_reach(curve(0.4, 0.2, 0.1), 0.3) == pytest.approx(25)
    assert labels_to_reach(curve(0.4, 0.2, 0.1), 0.4) == 20
    assert labels_to_reach(curve(0.4, 0.2, 0.1), 0.05) == 40  # never: all of them
    assert labels_to_reach(curve(0.4, 0.1, 0.2), 0.15) == pytest.approx(20 + 250 / 30)


@pytest.mark.parametrize("profile", active.PROFILES)
def test_strategies_of_a_seed_differ_in_their_selection_alone(profile):
    specs = {spec.id: spec for spec in active.specs(profile)}
    for seed in range(active.PROFILES[profile].seeds):
        first, second = (
            dict(specs[f"{name}-seed{seed}"].settings["campaign"]) for name in ("guided", "random")
        )
        assert first.pop("select")["score"] != second.pop("select")["score"]
        assert first == second
        assert specs[f"guided-seed{seed}"].needs == ("pool-seed0",)


@pytest.mark.slow
def test_the_example_runs(tmp_path):
    """Pool by GFN2-xTB, a guided and a random campaign with the same first labels, the table."""
    pytest.importorskip("tblite")
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
    found = {spec.id: layout.read(spec) for spec in active.specs("quick")}
    guided, random = found["guided-seed0"], found["random-seed0"]
    assert guided is not None
    assert random is not None
    for result in (guided, random):
        assert [point["labels"] for point in result["details"]["curve"]] == [6, 10]
        assert result["metrics"]["labels"]["value"] == 10
    first, other = ([p["frame"] for p in r["details"]["picks"]] for r in (guided, random))
    assert first[:6] == other[:6]
    assert first[6:] != other[6:]
    assert guided["metrics"]["force_mae_6"] == random["metrics"]["force_mae_6"]
    table = (layout.results / "table.md").read_text()
    assert "| guided | 1 |" in table
    assert "| random | 1 |" in table
