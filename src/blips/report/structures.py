"""Structures for the page's 3D view: the most uncertain of a set, and what a campaign picked."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from blips.errors import BlipsError
from blips.potential import BayesianPotential
from blips.prediction import Prediction
from blips.train.checkpoint import load
from blips.uq.assess import References
from blips.uq.plots import Plot, numbers

MAX_ATOMS = 2000
MAX_ROUNDS = 30


def uncertain_structures(
    structures: Sequence[Atoms], prediction: Prediction, references: References, count: int
) -> list[dict[str, Any]]:
    """Return those with the largest atomic force std (root of summed component variances)."""
    if prediction.forces_total_std is None:
        return []
    std = np.linalg.norm(prediction.forces_total_std, axis=1)  # [N]
    error = None
    if references.forces is not None:
        error = np.linalg.norm(prediction.array("forces") - references.forces, axis=1)  # [N]
    ends = np.cumsum(references.n_atoms)
    atoms_of = [slice(end - n, end) for end, n in zip(ends, references.n_atoms, strict=True)]
    largest = np.array([std[atoms].max() for atoms in atoms_of])  # [S]
    order = [k for k in np.argsort(-largest, kind="stable") if len(structures[k]) <= MAX_ATOMS]
    return [
        _entry(
            int(k), structures[k], std[atoms_of[k]], None if error is None else error[atoms_of[k]]
        )
        for k in order[:count]
    ]


def _entry(index: int, atoms: Atoms, std: np.ndarray, error: np.ndarray | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "index": index,
        "formula": atoms.get_chemical_formula(),
        "symbols": list(atoms.symbols),
        "positions": [numbers(row) for row in atoms.positions],
        "std": numbers(std, 4),
        "std_max": numbers(std.max(), 4)[0],
    }
    if error is not None and not np.isnan(error).any():
        entry["error"] = numbers(error, 4)
    if atoms.pbc.any():
        entry["cell"] = [numbers(row) for row in atoms.cell.array]
    return entry


def viewed_set(
    name: str, entries: list[dict[str, Any]], plots: Mapping[str, Plot]
) -> dict[str, Any]:
    """Return one set of structures for the page: name, plots, structures on one colour scale."""
    std_max = max((entry["std_max"] for entry in entries), default=0.0)
    return {
        "name": name,
        "plots": {key: plot.to_dict() for key, plot in plots.items()},
        "structures": entries,
        "std_max": std_max,
    }


def picked_sets(folder: str | Path, summary: Mapping[str, Any], shown: int) -> list[dict[str, Any]]:
    """Return the labelled picks of every round, latest first: std when picked, later error.

    The `shown` most uncertain structures of each round; those whose model is gone are left out.
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
    return viewed_set(f"round {round}", entries, {})
