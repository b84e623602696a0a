"""What a campaign did, for reports."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blips.active.store import CampaignStore


def campaign_summary(folder: str | Path) -> dict[str, Any]:
    """Collect everything that the report of a campaign shows, from its folder.

    Returns:
        config: the configuration, as nested dictionaries.
        curve: one entry for each trained model: round, labels, model (its file), and its errors
            (energy_mae in eV/atom, force_mae, force_rmse and force_std in eV/A,
            force_rank_correlation) on the test structures; `surprise` has the same of the labels
            that this model asked for, before anything was trained on them, and with
            `select.rule: auto` the `trial` of the rules by them (`blips.active.auto`).
        rounds: one entry for each selection: round, rule, chosen, seen, excluded (by reason),
            largest (scores), force_mae_bound (eV/A, on the candidates), predicted_std (eV/A, of
            forces on the target: before and after the picks are labelled).
        picks: one entry for each chosen structure: name, round, status, score, reason (score,
            gain, rank, origin, scores), atoms (with labels where there are any), log (of failed
            attempts).
        labels, quarantined, open: how many picks are in each state.
        ended: why the campaign ended, or None.
    """
    with CampaignStore(folder, writable=False) as store:
        stages = ("train", "select", "evaluate", "surprise", "end")
        train, select, evaluate, surprise, end = (store.read_all(stage) for stage in stages)
        curve, picks = [], []
        for key, errors in evaluate.items():
            trained = {name: train[key][name] for name in ("labels", "model")}
            asked_for = surprise.get(key, {})
            curve.append({"round": key[0], **trained, **errors, "surprise": asked_for})
        labelled = iter(store.labelled())
        for pick in store.picks():
            atoms = next(labelled) if pick.status == "labelled" else pick.atoms
            about = {"name": pick.name, "atoms": atoms, "log": store.attempts(pick)}
            picks.append(vars(pick) | about)
        counts = Counter(pick["status"] for pick in picks)
        return {
            "config": store.read("config"),
            "curve": curve,
            "rounds": [{"round": key[0], **found} for key, found in select.items()],
            "picks": picks,
            "labels": counts["labelled"],
            "quarantined": counts["quarantined"],
            "open": counts["open"],
            "ended": end.get((store.last_round(), 0), {}).get("reason"),
        }


def labels_to_reach(
    curve: Sequence[Mapping[str, Any]], target: float, error: str = "force_mae"
) -> float:
    """Return the number of labels at which an error first reaches the target, interpolated.

    The error is one of the campaign's curve. One that never gets there counts with all its labels.
    """
    before = curve[0]
    for point in curve:
        if point[error] <= target:
            drop = before[error] - point[error]
            share = (before[error] - target) / drop if drop > 0 else 1.0
            return before["labels"] + share * (point["labels"] - before["labels"])
        before = point
    return float(curve[-1]["labels"])
