"""The report of an active-learning campaign: learning curve, rounds, picks and their reasons."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from blips.active.summary import campaign_summary, labels_to_reach
from blips.report.document import details, document, figures, table, viewer
from blips.report.structures import picked_sets
from blips.uq.plots import Plot, line

CURVE, FALLS = "curve-plot", "falls-plot"
MAX_PICKS = 1000

Entry = Mapping[str, Any]
Entries = Sequence[Entry]


def campaign_page(folder: str | Path, baseline: str | Path | None, shown: int) -> str:
    """Make the page of the campaign in a folder, with `shown` structures of each round.

    The baseline is a campaign to compare with, such as one with `select.rule: random`.
    """
    summary = campaign_summary(folder)
    other = None if baseline is None else campaign_summary(baseline)
    sets = picked_sets(folder, summary, shown)
    return render_campaign(Path(folder).resolve().name, summary, sets=sets, baseline=other)


def render_campaign(
    name: str,
    summary: Entry,
    *,
    sets: Entries = (),
    baseline: Entry | None = None,
) -> str:
    """Render the page of a campaign from its summary (`blips.active.summary`).

    `sets` are structures for the 3D view, see `blips.report.structures`.
    """
    curve, picks = _errors(summary), summary["picks"]
    falls = _falls(curve, summary["rounds"])
    plots = {CURVE: _curve(curve, baseline), FALLS: _fall_plot(falls)}
    drawn = {key: plot.to_dict() for key, plot in plots.items() if plot is not None}
    titles = {CURVE: "Errors over labels", FALLS: FALL_TITLE}
    first = "".join(
        f"<p>{escape(text)}</p>"
        for text in (_sentence(summary, curve), _compared(curve, baseline))
        if text
    )
    sections = [
        ("summary", "Summary", first + _curve_table(curve)),
        ("curves", "Learning curve", figures(drawn, titles) + _fall_table(falls)),
        ("rounds", "Rounds", _rounds(summary["rounds"]) + _trials(summary["curve"])),
        ("picks", "Picks", _picks(picks)),
        ("structures", "Picks in 3D", _in_3d(sets)),
        ("settings", "Settings", details("Configuration", json.dumps(summary["config"], indent=1))),
    ]
    lead = f"Ended: {summary['ended']}." if summary["ended"] else "Not ended yet."
    return document(f"Campaign {name}", lead, sections, {"sets": list(sets), "figures": drawn})


def _errors(summary: Entry) -> list[dict[str, Any]]:
    """Return the errors of every model: on the test set, else on the labels it asked for."""
    curve = [dict(entry) for entry in summary["curve"]]
    surprises = [entry.pop("surprise", None) or {} for entry in curve]
    if any("force_mae" in entry for entry in curve):
        return curve
    both = zip(curve, surprises, strict=True)
    return [{**entry, **found, "asked_for": True} for entry, found in both if found]


def _in_3d(sets: Entries) -> str:
    view = viewer(sets)
    note = (
        "Coloured by the std of the model that picked the structure; errors are that model's, "
        "against the label that it asked for."
    )
    return f'<p class="soft">{note}</p>{view}' if view else ""


def _compared(curve: Entries, baseline: Entry | None) -> str:
    """Say how many of the baseline's labels this campaign needed for its last error."""
    other = [] if baseline is None else _judged(_errors(baseline))
    own = _judged(curve)
    if not other or not own:
        return ""
    target, all_labels = other[-1]["force_mae"], other[-1]["labels"]
    text = f"The {_name(baseline)} ended at {target:.3g} eV/Å with {all_labels} labels; "
    if min(point["force_mae"] for point in own) > target:
        return text + f"this campaign did not get there with {own[-1]['labels']}."
    needed = labels_to_reach(own, target)
    return text + f"this campaign got there with {needed:.0f}, {100 * needed / all_labels:.0f} %."


def _judged(curve: Entries) -> list[Entry]:
    return [point for point in curve if point.get("force_mae") is not None]


def _name(baseline: Entry | None) -> str:
    return f"baseline ({baseline['config']['select']['rule']})" if baseline else ""


def _sentence(summary: Entry, curve: Entries) -> str:
    counts = f"{summary['labels']} labels, {summary['quarantined']} set aside, "
    text = counts + f"{summary['open']} open."
    if curve and "force_mae" in curve[-1]:
        first, last = curve[0], curve[-1]
        text += (
            f" The force MAE went from {first['force_mae']:.3g} eV/Å with {first['labels']} labels "
            f"to {last['force_mae']:.3g} eV/Å with {last['labels']}."
        )
    return text


ERRORS = {
    "force_mae": "force MAE (eV/Å)",
    "force_rmse": "force RMSE (eV/Å)",
    "force_std": "force std (eV/Å)",
    "energy_mae": "energy MAE (eV/atom)",
    "force_rank_correlation": "rank correlation of std and error",
}


def _curve(curve: Entries, baseline: Entry | None = None) -> Plot | None:
    names = [n for n in ("force_mae", "force_rmse", "force_std") if any(n in e for e in curve)]
    series = [_line(ERRORS[name], curve, name) for name in names]
    if len(curve) < 2 or not series:
        return None
    note = f"{len(curve)} models on one test set."
    if "asked_for" in curve[0]:
        note = "Each model on the labels that it asked for, before it was trained on them."
    other = [] if baseline is None else _judged(_errors(baseline))
    if other:
        series.append(_line(f"{_name(baseline)}: force MAE (eV/Å)", other, "force_mae"))
        note += " The baseline is another campaign."
    return Plot(
        "curve",
        note,
        f"Errors of {len(curve)} models against their number of labels.",
        {"label": "labels"},
        {"label": "eV/Å", "log": True},
        series,
    )


def _line(title: str, curve: Entries, name: str) -> dict[str, Any]:
    values = [entry.get(name, np.nan) for entry in curve]
    return line(title, [entry["labels"] for entry in curve], values)


FALL_TITLE = "Reduction of error by each batch"


def _falls(curve: Entries, rounds: Entries) -> list[list[float | None]]:
    """Compare what each batch of labels was predicted to do with what it did.

    Predicted: the force std on the target (the candidates, or `select.target`), in closed form,
    before and after the batch. Actual: the force RMSE of the models before and after.
    """
    rmse = {entry["round"]: entry.get("force_rmse") for entry in curve}
    return [
        [n, *_fall(*entry["predicted_std"]), *_fall(rmse.get(n), rmse.get(n + 1))]
        for n, entry in ((entry["round"], entry) for entry in rounds)
        if entry.get("predicted_std")
    ]


def _fall(before: float | None, after: float | None) -> tuple[float | None, ...]:
    return before, after, 100 * (1 - after / before) if before and after else None


def _fall_plot(falls: Sequence[list[float | None]]) -> Plot | None:
    if len(falls) < 2:
        return None
    round, _, _, predicted, _, _, actual = np.array(falls, dtype=float).T
    return Plot(
        "falls",
        "How much smaller each batch makes the force std by the closed form, without training; and "
        "how much smaller the force RMSE of the next model was.",
        f"Predicted and actual reduction of error by {len(falls)} batches.",
        {"label": "round"},
        {"label": "reduction, %"},
        [line("predicted", round, predicted), line("actual", round, actual)],
    )


def _fall_table(falls: Sequence[list[float | None]]) -> str:
    headers = ["Round", "Force std (eV/Å)", "Then", "Predicted reduction, %"]
    headers += ["Force RMSE (eV/Å)", "Then", "Actual reduction, %"]
    return table(FALL_TITLE, headers, falls) if falls else ""


def _curve_table(curve: Entries) -> str:
    shown = [name for name in ERRORS if any(name in entry for entry in curve)]
    rows = [
        [entry["round"], entry["labels"], *(entry.get(name) for name in shown)] for entry in curve
    ]
    return table("Models", ["Round", "Labels", *(ERRORS[name] for name in shown)], rows)


def _rounds(rounds: Entries) -> str:
    columns = list(dict.fromkeys(key for entry in rounds for key in entry))
    rows = [[entry.get(column) for column in columns] for entry in rounds]
    return table("What was chosen in each round", columns, rows) if rows else ""


def _trials(curve: Entries) -> str:
    """Tabulate how the rules did on the labels of each round, for `select.rule: auto`."""
    trials = [(e["round"], (e.get("surprise") or {}).get("trial")) for e in curve]
    rules = list(dict.fromkeys(rule for _, trial in trials for rule in trial or ()))
    rows = [
        [round, *(f"{100 * np.expm1(np.mean(trial[rule])):+.0f} %" for rule in rules)]
        for round, trial in trials
        if trial
    ]
    caption = "Force error after picks of each rule, against random picks, by cross-validation"
    return table(caption, ["Labels of round", *rules], rows) if rows else ""


def _picks(picks: Entries) -> str:
    if not picks:
        return ""
    shown = picks[:MAX_PICKS]
    rows = [
        [
            pick["name"],
            pick["atoms"].get_chemical_formula(),
            *(pick[key] for key in ("round", "status", "score", "reason")),
        ]
        for pick in shown
    ]
    left_out = "" if len(shown) == len(picks) else f", the first {len(shown)} of {len(picks)}"
    headers = ["Name", "Formula", "Round", "Status", "Score", "Reason"]
    return f'<div class="tall">{table(f"Chosen structures{left_out}", headers, rows)}</div>'
