"""Assess and recalibrate predictions on labelled structures, and write metrics and figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ase import Atoms

from blips.data.labels import Labels, available, extract
from blips.errors import InputError
from blips.files import replacing
from blips.prediction import Model, Prediction
from blips.uq.bootstrap import Interval
from blips.uq.calibrate import CALIBRATORS
from blips.uq.evaluate import Evaluation, evaluate

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

QUANTITIES = ("energy", "forces")
STD_FLOOR = 1e-6  # eV, eV/A: symmetry can make a std zero, by which no metric can divide


@dataclass(frozen=True)
class References:
    """Hold the labels of S structures with N atoms in all."""

    n_atoms: np.ndarray  # [S]
    numbers: np.ndarray  # [N]
    energy: np.ndarray | None  # [S] eV
    forces: np.ndarray | None  # [N, 3] eV/A

    @classmethod
    def of(cls, structures: Sequence[Atoms], labels: Labels | None = None) -> References:
        """Read energies and forces of labelled structures; a quantity that one lacks is None."""
        if not structures:
            raise InputError("no structures to evaluate on; the list is empty")
        has = set(QUANTITIES).intersection(*(available(atoms, labels) for atoms in structures))
        if not has:
            raise InputError(
                "the structures have neither energies nor forces in common; evaluation needs "
                "labels (say under which keys with data.labels)"
            )
        values = [extract(atoms, sorted(has), labels) for atoms in structures]
        return cls(
            n_atoms=np.array([len(atoms) for atoms in structures]),
            numbers=np.concatenate([atoms.numbers for atoms in structures]),
            energy=np.array([v["energy"] for v in values]) if "energy" in has else None,
            forces=np.concatenate([v["forces"] for v in values]) if "forces" in has else None,
        )


def assess(
    prediction: Prediction, references: References, *, n_bootstrap: int = 1000, seed: int = 0
) -> Evaluation:
    """Compute every metric of a prediction, with bootstrap intervals; stds are floored at 1e-6."""
    energy = prediction.energy if references.energy is not None else None
    forces = prediction.forces if references.forces is not None else None
    return evaluate(
        energy,
        _floored(prediction.energy_total_std) if energy is not None else None,
        references.energy,
        forces,
        _floored(prediction.forces_total_std) if forces is not None else None,
        references.forces,
        references.n_atoms,
        references.numbers,
        n_bootstrap=n_bootstrap,
        seed=seed,
    )


def recalibrate(
    potential: Model,
    structures: Sequence[Atoms],
    *,
    kind: str = "scale",
    labels: Labels | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fit a calibration on held-out structures and store it with the potential.

    Args:
        potential: its `calibration` is replaced.
        structures: labelled, neither trained on nor tested on.
        kind: "scale" (one factor, NLL-optimal), "isotonic" or "conformal".
        labels: names and units of the labels.
        options: of `potential.predict` (samples, method, seed, ...).

    Returns:
        The calibrators by quantity.
    """
    if kind not in CALIBRATORS:
        raise InputError(f"unknown calibration {kind!r}; use one of {', '.join(CALIBRATORS)}")
    references = References.of(structures, labels)
    prediction = potential.predict(structures, calibrated=False, **options)
    fitted = {}
    for quantity in QUANTITIES:
        target = getattr(references, quantity)
        if target is not None:
            mean = getattr(prediction, quantity)
            std = prediction.array(f"{quantity}_total_std")
            uncertain = std > STD_FLOOR  # what symmetry makes certain says nothing about scale
            fitted[quantity] = CALIBRATORS[kind].fit(
                mean[uncertain], std[uncertain], target[uncertain]
            )
    potential.calibration = dict(fitted)
    return fitted


def write_figures(
    folder: str | Path, predictions: Mapping[str, Prediction], references: References
) -> list[Path]:
    """Draw parity, reliability, error against std, rejection and errors by element as PNG.

    Args:
        folder: where they go.
        predictions: by label; the first is the one that single-model figures show.
        references: the labels.
    """
    figures = _energy_figures(predictions, references) | _force_figures(predictions, references)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path)
    return paths


def _energy_figures(
    predictions: Mapping[str, Prediction], references: References
) -> dict[str, Figure]:
    from blips.uq import plots

    if references.energy is None:
        return {}
    first = next(iter(predictions.values()))
    mean, std = first.array("energy"), _floored(first.energy_total_std)
    parity = plots.plot_parity(mean, std, references.energy, quantity="energy", unit="eV")
    return {"parity_energy": parity}


def _force_figures(
    predictions: Mapping[str, Prediction], references: References
) -> dict[str, Figure]:
    from blips.uq import plots

    if references.forces is None:
        return {}
    target = references.forces
    arrays = {k: (p.array("forces"), _floored(p.forces_total_std)) for k, p in predictions.items()}
    mean, std = next(iter(arrays.values()))
    figures = {"parity_forces": plots.plot_parity(mean, std, target)}
    with_std = {k: (m, s, target) for k, (m, s) in arrays.items() if s is not None}
    if std is not None:
        figures["std_error"] = plots.plot_std_error(mean, std, target)
    if with_std:
        figures["reliability"] = plots.plot_reliability(with_std)
        norms = {
            k: (np.linalg.norm(s, axis=-1), np.linalg.norm(m - target, axis=-1))
            for k, (m, s, _) in with_std.items()
        }
        figures["rejection"] = plots.plot_rejection(norms)
    by_element = {k: _element_mae(p, references) for k, p in predictions.items()}
    return figures | {"elements": plots.plot_elements(by_element)}


def write_evaluation(path: str | Path, evaluations: Mapping[str, Evaluation]) -> Path:
    """Write metrics as JSON, by label."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {label: evaluation.to_dict() for label, evaluation in evaluations.items()}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
    return path


def evaluation_table(evaluations: Mapping[str, Evaluation]) -> Table:
    """Lay out one row per metric and one column per model for the terminal, with intervals."""
    from rich.table import Table

    table = Table(title="metrics, 95 % bootstrap intervals over structures")
    for header in ("level", "metric", "unit", *evaluations):
        table.add_column(header)
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for label, evaluation in evaluations.items():
        for row in evaluation.rows():
            cell = str(Interval(row["value"], row["low"], row["high"])).replace("[", r"\[")
            rows.setdefault((row["level"], row["metric"], row["unit"]), {})[label] = cell
    for key, cells in rows.items():
        level = key[0].replace("[", r"\[")
        table.add_row(level, *key[1:], *(cells.get(label, "-") for label in evaluations))
    return table


def _floored(std: np.ndarray | None) -> np.ndarray | None:
    return None if std is None else np.maximum(std, STD_FLOOR)


def _element_mae(prediction: Prediction, references: References) -> dict[str, Interval]:
    tables = assess(prediction, references, n_bootstrap=200).per_element
    return {symbol: table["mae"] for symbol, table in tables.items()}
