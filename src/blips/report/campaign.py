"""The report of an active-learning campaign: learning curve, rounds, picks and their reasons."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blips.active.summary import labels_to_reach
from blips.report.document import document
from blips.uq.plots import Plot, line

MAX_PICKS = 1000
PICK = ("name", "formula", "round", "status", "score", "reason")
MODEL = {  # columns of the table of models
    "round": "Round",
    "labels": "Labels",
    "force_mae": "force MAE (eV/Å)",
    "force_rmse": "force RMSE (eV/Å)",
    "force_std": "force std (eV/Å)",
    "energy_mae": "energy MAE (eV/atom)",
    "force_rank_correlation": "rank correlation of std and error",
}
DRAWN = ("force_mae", "force_rmse", "force_std")

Entry = Mapping[str, Any]
Entries = Sequence[Entry]


def render_campaign(
    name: str, summary: Entry, *, sets: Entries = (), baseline: Entry | None = None
) -> str:
    """Render the page of a campaign from its summary (`blips.active.summary`).

    `sets` are structures for the 3D view (`blips.report.structures`), the baseline the summary of
    a campaign to compare with, such as one with `select.rule: random`.
    """
    curve, rounds = _errors(summary), summary["rounds"]
    other, other_name = [], ""
    if baseline is not None:
        other = _judged(_errors(baseline))
        other_name = f"baseline ({baseline['config']['select']['rule']})"
    shown = [name for name in MODEL if any(name in entry for entry in curve)]
    of_rounds = list(dict.fromkeys(key for entry in rounds for key in entry))
    picks = [
        {**pick, "formula": pick["atoms"].get_chemical_formula()}
        for pick in summary["picks"][:MAX_PICKS]
    ]
    return document(
        "campaign.html",
        f"Campaign {name}",
        f"Ended: {summary['ended']}." if summary["ended"] else "Not ended yet.",
        sets=sets,
        figures={"curve-plot": _curve(curve, other, other_name)},
        summary=summary,
        curve=curve,
        compared=_compared(curve, other, other_name),
        models=([MODEL[name] for name in shown], _rows(curve, shown)),
        falls=_falls(curve, rounds),
        rounds=(of_rounds, _rows(rounds, of_rounds)),
        picks=([name.capitalize() for name in PICK], _rows(picks, PICK)),
        config=json.dumps(summary["config"], indent=1),
    )


def _rows(entries: Entries, columns: Sequence[str]) -> list[list[Any]]:
    return [[entry.get(column) for column in columns] for entry in entries]


def _errors(summary: Entry) -> list[dict[str, Any]]:
    """Return the errors of every model: on the test set, else on the labels it asked for."""
    curve = [dict(entry) for entry in summary["curve"]]
    surprises = [entry.pop("surprise", None) or {} for entry in curve]
    if any("force_mae" in entry for entry in curve):
        return curve
    both = zip(curve, surprises, strict=True)
    return [{**entry, **found, "asked_for": True} for entry, found in both if found]


def _judged(curve: Entries) -> list[Entry]:
    return [point for point in curve if point.get("force_mae") is not None]


def _compared(curve: Entries, other: Entries, other_name: str) -> str:
    """Say how many of the baseline's labels this campaign needed for its last error."""
    own = _judged(curve)
    if not other or not own:
        return ""
    target, all_labels = other[-1]["force_mae"], other[-1]["labels"]
    text = f"The {other_name} ended at {target:.3g} eV/Å with {all_labels} labels; "
    if min(point["force_mae"] for point in own) > target:
        return text + f"this campaign did not get there with {own[-1]['labels']}."
    needed = labels_to_reach(own, target)
    return text + f"this campaign got there with {needed:.0f}, {100 * needed / all_labels:.0f} %."


def _curve(curve: Entries, other: Entries, other_name: str) -> Plot | None:
    drawn = [(MODEL[name], curve, name) for name in DRAWN if any(name in one for one in curve)]
    if len(curve) < 2 or not drawn:
        return None
    note = f"{len(curve)} models on one test set."
    if "asked_for" in curve[0]:
        note = "Each model on the labels that it asked for, before it was trained on them."
    if other:
        drawn.append((f"{other_name}: force MAE (eV/Å)", other, "force_mae"))
        note += " The baseline is another campaign."
    series = [
        line(title, [one["labels"] for one in entries], [one.get(name, np.nan) for one in entries])
        for title, entries, name in drawn
    ]
    return Plot(
        f"Errors of {len(curve)} models against their number of labels",
        note,
        x={"label": "labels"},
        y={"label": "eV/Å", "log": True},
        series=series,
    )


def _falls(curve: Entries, rounds: Entries) -> list[list[Any]]:
    """Tabulate what each batch of labels was predicted to do beside what it did.

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
