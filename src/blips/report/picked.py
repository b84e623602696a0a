"""What a campaign picked, for the page's 3D view: sigma when it was picked, error afterwards."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blips.errors import BlipsError
from blips.potential import BayesianPotential
from blips.report.structures import uncertain_structures
from blips.train.checkpoint import load
from blips.uq.assess import References

MAX_ROUNDS = 30


def picked_sets(folder: str | Path, summary: Mapping[str, Any], shown: int) -> list[dict[str, Any]]:
    """The labelled picks of every round with what the model that chose them said, latest first.

    Args:
        folder: of the campaign, where its models are. Rounds whose model is gone are left out.
        summary: what `blips.active.summary.campaign_summary` returns.
        shown: structures of each round, the most uncertain ones.
    """
    rounds: dict[int, list[Mapping[str, Any]]] = {}
    for pick in summary["picks"]:
        if pick["round"] > 0 and pick["status"] == "labelled":
            rounds.setdefault(pick["round"], []).append(pick)
    found = []
    for round in sorted(rounds, reverse=True)[:MAX_ROUNDS]:
        model = _model(Path(folder), summary, round)
        if model is not None:
            found.append(_set(round, rounds[round], model, summary["config"], shown))
    return found


def _model(folder: Path, summary: Mapping[str, Any], round: int) -> BayesianPotential | None:
    name = next((entry["model"] for entry in summary["curve"] if entry["round"] == round), "")
    path = folder / name
    if not name or not path.is_file():
        return None
    try:
        model = load(path)
    except BlipsError:
        return None
    return model if isinstance(model, BayesianPotential) else None


def _set(
    round: int,
    picks: Sequence[Mapping[str, Any]],
    model: BayesianPotential,
    config: Mapping[str, Any],
    shown: int,
) -> dict[str, Any]:
    structures = [pick["atoms"] for pick in picks]
    options = {key: config["select"][key] for key in ("samples", "method")}
    prediction = model.predict(structures, seed=config["seed"], **options)
    entries = uncertain_structures(structures, prediction, References.of(structures), shown)
    for entry in entries:
        entry["index"] = picks[entry["index"]]["name"]
    return {
        "name": f"round {round}",
        "plots": {},
        "structures": entries,
        "sigma_max": max((entry["sigma_max"] for entry in entries), default=0.0),
    }
