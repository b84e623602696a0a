"""Structures for the page's 3D view: the most uncertain of a set, and what a campaign picked."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from blips.errors import BlipsError
from blips.prediction import Prediction
from blips.train.released import load_once
from blips.uq.assess import References
from blips.uq.plots import Plot, numbers

SHOWN = 12  # structures of each set
MAX_ATOMS = 2000
MAX_ROUNDS = 30


def viewed_set(
    name: str,
    structures: Sequence[Atoms],
    prediction: Prediction,
    references: References,
    *,
    plots: Mapping[str, Plot],
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """Return one set of structures for the page: name, plots, structures on one colour scale.

    They are the SHOWN ones with the largest atomic force std (root of summed component
    variances), called by `names`, else by their numbers.
    """
    entries: list[dict[str, Any]] = []
    if prediction.largest_force_std is not None:
        order: list[int] = np.argsort(-prediction.largest_force_std, kind="stable").tolist()
        labels: Sequence[Any] = [None] * len(structures)
        if references.forces is not None:
            labels = np.split(references.forces, np.cumsum(references.n_atoms)[:-1])
        entries = [
            _entry(names[k] if names else k, structures[k], prediction[k], labels[k])
            for k in [k for k in order if len(structures[k]) <= MAX_ATOMS][:SHOWN]
        ]
    return {
        "name": name,
        "plots": {key: vars(plot) for key, plot in plots.items()},
        "structures": entries,
        "std_max": max((entry["std_max"] for entry in entries), default=0.0),
    }


def _entry(
    index: int | str, atoms: Atoms, one: Prediction, labels: np.ndarray | None
) -> dict[str, Any]:
    std = np.linalg.norm(one.array("forces_total_std"), axis=1)
    entry: dict[str, Any] = {
        "index": index,
        "formula": atoms.get_chemical_formula(),
        "symbols": list(atoms.symbols),
        "positions": [numbers(row) for row in atoms.positions],
        "std": numbers(std, 4),
        "std_max": numbers(std.max(), 4)[0],
    }
    if labels is not None and not np.isnan(labels).any():
        entry["error"] = numbers(np.linalg.norm(one.array("forces") - labels, axis=1), 4)
    if atoms.pbc.any():
        entry["cell"] = [numbers(row) for row in atoms.cell.array]
    return entry


def picked_sets(folder: str | Path, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the labelled picks of every round, latest first: std when picked, later error.

    The SHOWN most uncertain structures of each round; those whose model is gone are left out.
    """
    files = {entry["round"]: Path(folder) / entry["model"] for entry in summary["curve"]}
    picks = [p for p in summary["picks"] if p["round"] in files and p["status"] == "labelled"]
    config, found = summary["config"], []
    for round in sorted({pick["round"] for pick in picks}, reverse=True)[:MAX_ROUNDS]:
        try:
            model = load_once(files[round])
        except BlipsError:
            continue
        own = [pick for pick in picks if pick["round"] == round]
        structures, names = [pick["atoms"] for pick in own], [pick["name"] for pick in own]
        select = config["select"]
        options = {"samples": select["samples"], "method": select["method"]}
        prediction = model.predict(structures, seed=config["seed"], **options)
        title, references = f"round {round}", References.of(structures)
        found.append(viewed_set(title, structures, prediction, references, plots={}, names=names))
    return found
