"""The report of an active-learning campaign: learning curve, rounds, picks and their reasons."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blips.active.summary import labels_to_reach
from blips.report.document import document
from blips.uq.plots import Plot, line

MAX_PICKS = 1000
PICK_COLUMNS = ("name", "formula", "round", "status", "score", "reason")
ERRORS = {
    "force_mae": "force MAE (eV/Å)",
    "force_rmse": "force RMSE (eV/Å)",
    "force_std": "force std (eV/Å)",
    "energy_mae": "energy MAE (eV/atom)",
    "force_rank_correlation": "rank correlation of std and error",
}

Entry = Mapping[str, Any]
Entries = Sequence[Entry]
Table = tuple[list[str], list[list[Any]]]  # headers and rows


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
    picks = summary["picks"]
    cut = f", the first {MAX_PICKS} of {len(picks)}" if len(picks) > MAX_PICKS else ""
    return document(
        "campaign.html",
        f"Campaign {name}",
        f"Ended: {summary['ended']}." if summary["ended"] else "Not ended yet.",
        sets=sets,
        figures={"curve-plot": _curve(curve, other, other_name)},
        said=(_sentence(summary, curve), _compared(curve, other, other_name)),
        models=_models(curve),
        falls=_falls(curve, rounds),
        rounds=_rounds(rounds),
        picks_caption=f"Chosen structures{cut}",
        pick_columns=PICK_COLUMNS,
        picks=_picks(picks[:MAX_PICKS]),
        config=json.dumps(summary["config"], indent=1),
    )


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


def _curve(curve: Entries, other: Entries, other_name: str) -> Plot | None:
    def errors(title: str, curve: Entries, name: str) -> dict[str, Any]:
        values = [entry.get(name, np.nan) for entry in curve]
        return line(title, [entry["labels"] for entry in curve], values)

    names = [n for n in ("force_mae", "force_rmse", "force_std") if any(n in e for e in curve)]
    if len(curve) < 2 or not names:
        return None
    series = [errors(ERRORS[name], curve, name) for name in names]
    note = f"{len(curve)} models on one test set."
    if "asked_for" in curve[0]:
        note = "Each model on the labels that it asked for, before it was trained on them."
    if other:
        series.append(errors(f"{other_name}: force MAE (eV/Å)", other, "force_mae"))
        note += " The baseline is another campaign."
    return Plot(
        "curve",
        note,
        f"Errors of {len(curve)} models against their number of labels.",
        {"label": "labels"},
        {"label": "eV/Å", "log": True},
        series,
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


def _models(curve: Entries) -> Table:
    shown = [name for name in ERRORS if any(name in entry for entry in curve)]
    rows = [[entry.get(name) for name in ("round", "labels", *shown)] for entry in curve]
    return ["Round", "Labels", *(ERRORS[name] for name in shown)], rows


def _rounds(rounds: Entries) -> Table:
    columns = list(dict.fromkeys(key for entry in rounds for key in entry))
    return columns, [[entry.get(column) for column in columns] for entry in rounds]


def _picks(picks: Entries) -> list[list[Any]]:
    formulas = [{"formula": pick["atoms"].get_chemical_formula(), **pick} for pick in picks]
    return [[pick[column] for column in PICK_COLUMNS] for pick in formulas]
