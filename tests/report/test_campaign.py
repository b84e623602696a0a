"""The report of a campaign, from the summary that a campaign gives of itself."""

import json

from ase.build import molecule

from blips.report.campaign import render_campaign
from report.test_report import Page

SUMMARY = {
    "config": {"folder": "runs/<b>"},
    "curve": [
        {"round": 0, "labels": 20, "force_mae": 0.4, "force_rmse": 0.6, "force_std": 0.3},
        {"round": 1, "labels": 40, "force_mae": 0.2, "force_rmse": 0.3, "force_std": None},
    ],
    "rounds": [{"round": 0, "chosen": 20, "seen": 400, "excluded": {"exploded": 3}}],
    "picks": [
        {
            "name": "0-<i>1",
            "round": 0,
            "status": "labelled",
            "score": 1.5,
            "reason": {"score": 1.5, "rank": 0, "origin": "md at 300 K"},
            "atoms": molecule("NH3"),
            "log": [],
        }
    ],
    "labels": 20,
    "quarantined": 1,
    "open": 0,
    "ended": "the budget is spent",
}


def test_a_campaign_has_its_curve_rounds_and_picks_with_reasons():
    page = Page(render_campaign("ammonia", SUMMARY))
    figures = json.loads(page.scripts[0])["figures"]
    assert figures["curve-plot"]["series"][0]["y"] == [0.4, 0.2]
    assert figures["curve-plot"]["series"][2]["y"] == [0.3, None]
    for text in (
        "from 0.4 eV/Å with 20 labels to 0.2 eV/Å with 40",
        "Ended: the budget is spent.",
        "exploded 3",
        "origin md at 300 K",
        "0-<i>1",
    ):
        assert text in page.text
    assert not {"i", "b"} & {tag for tag, _ in page.tags}


def test_json_within_a_script_cannot_end_it():
    hostile = "</script><!--&"
    sets = [{"name": hostile, "plots": {}, "structures": [], "std_max": 0.0}]
    page = Page(render_campaign(hostile, SUMMARY, sets=sets))
    assert len(page.scripts) == 3
    assert not {"<", ">", "&"} & set(page.scripts[0])
    assert json.loads(page.scripts[0])["sets"] == sets
    assert f"Campaign {hostile}" in page.text


def test_what_each_batch_was_predicted_to_do_is_beside_what_it_did():
    rounds = [{"round": k, "rule": "random", "predicted_std": [0.5, 0.4]} for k in (0, 1)]
    page = Page(render_campaign("ammonia", SUMMARY | {"rounds": rounds}))
    assert "Actual reduction, %00.50.4200.60.35010.50.4200.3--" in page.text
    assert "Predicted reduction, %" in page.text
    assert "Predicted reduction" not in Page(render_campaign("ammonia", SUMMARY)).text


def test_a_campaign_that_has_just_begun():
    empty = SUMMARY | {"curve": [], "rounds": [], "picks": [], "ended": None}
    page = Page(render_campaign("ammonia", empty))
    assert "Not ended yet." in page.text
    assert len(page.scripts) == 3  # no 3D view, no viewer
    assert json.loads(page.scripts[0])["figures"] == {}


def test_a_baseline_is_drawn_and_compared():
    random = SUMMARY | {
        "config": {"select": {"rule": "random"}},
        "curve": [
            {"round": 1, "labels": 20, "force_mae": 0.4},
            {"round": 2, "labels": 40, "force_mae": 0.3},
        ],
    }
    page = Page(render_campaign("ammonia", SUMMARY, baseline=random))
    series = json.loads(page.scripts[0])["figures"]["curve-plot"]["series"]
    assert series[-1]["name"] == "baseline (random): force MAE (eV/Å)"
    assert series[-1]["y"] == [0.4, 0.3]
    said = (
        "baseline (random) ended at 0.3 eV/Å with 40 labels; this campaign got there with 30, 75 %"
    )
    assert said in page.text
    better = random | {"curve": [{"round": 1, "labels": 20, "force_mae": 0.1}]}
    page = Page(render_campaign("ammonia", SUMMARY, baseline=better))
    assert "did not get there with 40" in page.text


def test_a_campaign_without_a_test_set_is_judged_by_the_labels_it_asked_for():
    curve = [
        {"round": 1, "labels": 20, "surprise": {"force_mae": 0.5, "force_std": 0.6}},
        {"round": 2, "labels": 30, "surprise": {"force_mae": 0.3, "force_std": 0.2}},
        {"round": 3, "labels": 40, "surprise": {}},
    ]
    page = Page(render_campaign("ammonia", SUMMARY | {"curve": curve}))
    plot = json.loads(page.scripts[0])["figures"]["curve-plot"]
    assert plot["series"][0]["x"] == [20, 30]
    assert plot["series"][0]["y"] == [0.5, 0.3]
    assert "before it was trained on them" in plot["note"]
    assert "from 0.5 eV/Å with 20 labels to 0.3 eV/Å with 30" in page.text
    assert "surprise" not in page.text
