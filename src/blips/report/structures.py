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

SHOWN = 12  # structures of each set
MAX_ATOMS = 2000
MAX_ROUNDS = 30


def viewed_set(
    name: str,
    structures: Sequence[Atoms],
    prediction: Prediction,
    references: References,
    *,
    plots: Mapping[str, Plot] | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return one set of structures for the page: name, plots, structures on one colour scale.

    They are the SHOWN ones with the largest atomic force std (root of summed component
    variances), called by `names`, else by their numbers.
    """
    entries: list[dict[str, Any]] = []
    called: Sequence[int | str] = range(len(structures)) if names is None else names
    if prediction.forces_total_std is not None:
        ends = np.cumsum(references.n_atoms)[:-1]
        stds = np.split(np.linalg.norm(prediction.forces_total_std, axis=1), ends)  # [n] of each
        errors: list[np.ndarray | None] = [None] * len(structures)
        if references.forces is not None:
            error = np.linalg.norm(prediction.array("forces") - references.forces, axis=1)  # [N]
            errors = [*np.split(error, ends)]
        order: list[int] = np.argsort([-std.max() for std in stds], kind="stable").tolist()
        entries = [
            _entry(called[k], structures[k], stds[k], errors[k])
            for k in [k for k in order if len(structures[k]) <= MAX_ATOMS][:SHOWN]
        ]
    return {
        "name": name,
        "plots": {key: plot.to_dict() for key, plot in (plots or {}).items()},
        "structures": entries,
        "std_max": max((entry["std_max"] for entry in entries), default=0.0),
    }


def _entry(
    index: int | str, atoms: Atoms, std: np.ndarray, error: np.ndarray | None
) -> dict[str, Any]:
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


def picked_sets(folder: str | Path, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the labelled picks of every round, latest first: std when picked, later error.

    The SHOWN most uncertain structures of each round; those whose model is gone are left out.
    """
    files = {entry["round"]: Path(folder) / entry["model"] for entry in summary["curve"]}
    picks = [p for p in summary["picks"] if p["round"] in files and p["status"] == "labelled"]
    config, found = summary["config"], []
    for round in sorted({pick["round"] for pick in picks}, reverse=True)[:MAX_ROUNDS]:
        try:
            model = load(files[round])
        except BlipsError:
            continue
        if isinstance(model, BayesianPotential):
            structures = [pick["atoms"] for pick in picks if pick["round"] == round]
            names = [pick["name"] for pick in picks if pick["round"] == round]
            options = {key: config["select"][key] for key in ("samples", "method")}
            prediction = model.predict(structures, seed=config["seed"], **options)
            references = References.of(structures)
            found.append(
                viewed_set(f"round {round}", structures, prediction, references, names=names)
            )
    return found
