"""Predictions and histories as data for the page's plots.

A plot is {kind, summary, note, x, y, series, ...}: axes have a label and may be logarithmic; a
series has a name, a kind ("points", "line" or "guide"), x and y, and for points which structure,
atom and component they belong to. `summary` is what a screen reader says.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blips.prediction import Prediction
from blips.uq.assess import STD_FLOOR, References
from blips.uq.metrics import binned_errors, ece_of_curve, reliability_curve
from blips.uq.ranking import rejection_curve

MAX_POINTS = 1500
Plot = dict[str, Any]


def numbers(values: Any, digits: int = 5) -> list[float | None]:
    """Numbers for JSON, to some significant digits; None where not finite."""
    flat = np.asarray(values, dtype=float).ravel()
    return [float(f"{v:.{digits}g}") if np.isfinite(v) else None for v in flat]


def prediction_plots(prediction: Prediction, references: References) -> dict[str, Plot]:
    """All plots of one set of labelled structures, by name."""
    plots: dict[str, Plot] = {}
    if references.energy is not None:
        plots["parity_energy"] = _parity_energy(prediction, references)
    if references.forces is not None:
        plots["parity_forces"] = _parity_forces(prediction, references)
        if prediction.forces_total_std is not None:
            std = np.maximum(prediction.forces_total_std, STD_FLOOR)
            plots["reliability"] = _reliability(prediction, references)
            plots["rejection"] = _rejection(prediction.array("forces"), std, references.forces)
            plots["sigma_error"] = _sigma_error(prediction.array("forces"), std, references.forces)
    return plots


def training_plot(history: Sequence[Mapping[str, float]]) -> Plot | None:
    """Losses over the epochs."""
    if len(history) < 2:
        return None
    epochs = [row["epoch"] for row in history]
    names = {"train_loss": "training loss", "valid_loss": "validation loss"}
    series = [
        {
            "name": names[key],
            "kind": "line",
            "x": numbers(epochs),
            "y": numbers([row.get(key, np.nan) for row in history]),
        }
        for key in names
        if any(key in row for row in history)
    ]
    valid = [row.get("valid_loss", np.inf) for row in history]
    best = int(np.argmin(valid))
    note = f"Least validation loss {valid[best]:.4g} at epoch {epochs[best]:.0f}."
    losses = [row[key] for row in history for key in names if key in row]
    return {
        "kind": "training",
        "note": note,
        "summary": f"Loss against epoch, {len(history)} epochs. {note}",
        "x": {"label": "epoch"},
        "y": {"label": "loss", "log": min(losses) > 0},
        "series": series,
    }


def _parity_energy(prediction: Prediction, references: References) -> Plot:
    """Energies less the mean reference energy, so that axes show differences."""
    energy, target = prediction.array("energy"), references.energy
    reference = np.asarray(target)
    shift = float(reference.mean())
    chosen = _thinned(len(energy))
    error = float(np.abs(energy - reference).mean())
    series = {
        "name": "structures",
        "kind": "points",
        "x": numbers(reference[chosen] - shift),
        "y": numbers(energy[chosen] - shift),
        "structure": chosen.tolist(),
        **_sigma(prediction.energy_total_std, chosen),
    }
    note = (
        f"MAE {error:.4g} eV. Energies from their mean, {shift:.6g} eV.{_left_out(energy, chosen)}"
    )
    return _parity_plot("Energy", "eV", series, note)


def _parity_forces(prediction: Prediction, references: References) -> Plot:
    forces, target = prediction.array("forces"), np.asarray(references.forces)
    structure = np.repeat(np.arange(len(references.n_atoms)), references.n_atoms)  # [N]
    first = np.concatenate([[0], np.cumsum(references.n_atoms)[:-1]])
    atom = np.arange(len(forces)) - first[structure]
    chosen = _thinned(forces.size)
    rows, component = np.divmod(chosen, 3)
    series = {
        "name": "force components",
        "kind": "points",
        "x": numbers(target.ravel()[chosen]),
        "y": numbers(forces.ravel()[chosen]),
        "structure": structure[rows].tolist(),
        "atom": atom[rows].tolist(),
        "component": component.tolist(),
        **_sigma(prediction.forces_total_std, chosen),
    }
    error = float(np.abs(forces - target).mean())
    note = f"MAE {error:.4g} eV/Å.{_left_out(forces.ravel(), chosen)}"
    return _parity_plot("Force component", "eV/Å", series, note)


def _parity_plot(quantity: str, unit: str, series: dict[str, Any], note: str) -> Plot:
    return {
        "kind": "parity",
        "note": note,
        "summary": f"{quantity}: predicted against reference, {len(series['x'])} points. {note}",
        "x": {"label": f"reference ({unit})"},
        "y": {"label": f"predicted ({unit})"},
        "equal": True,
        "diagonal": "predicted = reference",
        "series": [series],
    }


def _reliability(prediction: Prediction, references: References) -> Plot:
    series, notes = [], []
    for name, quantity in (("forces", "force components"), ("energy", "energies")):
        std, target = getattr(prediction, f"{name}_total_std"), getattr(references, name)
        if std is not None and target is not None:
            p, observed = reliability_curve(
                prediction.array(name), np.maximum(std, STD_FLOOR), target
            )
            series.append(
                {"name": quantity, "kind": "line", "x": numbers(p), "y": numbers(observed)}
            )
            notes.append(f"ECE of {quantity} {float(ece_of_curve(observed)):.3f}")
    note = "; ".join(notes) + "."
    return {
        "kind": "reliability",
        "note": note,
        "summary": f"Observed against predicted cumulative probability. {note}",
        "x": {"label": "predicted probability p", "range": [0, 1]},
        "y": {"label": "fraction below the p-quantile", "range": [0, 1]},
        "diagonal": "ideal",
        "series": series,
    }


def _rejection(forces: np.ndarray, std: np.ndarray, target: np.ndarray) -> Plot:
    uncertainty = np.linalg.norm(std, axis=1)
    curve = rejection_curve(uncertainty, np.linalg.norm(forces - target, axis=1))
    chosen = np.flatnonzero(curve.fraction <= 0.99)
    chosen = chosen[_thinned(len(chosen), 200)]
    x = numbers(100.0 * curve.fraction[chosen])
    note = f"Area {curve.auc_normalised:.2f}; random is 1, an oracle 0."
    return {
        "kind": "rejection",
        "note": note,
        "summary": "Mean force error of the atoms that remain when the most uncertain are "
        f"dropped. {note}",
        "x": {"label": "dropped, most uncertain first (%)", "range": [0, 100]},
        "y": {"label": "mean remaining error (eV/Å)"},
        "series": [
            {"name": "by sigma", "kind": "line", "x": x, "y": numbers(curve.error[chosen])},
            {"name": "oracle", "kind": "line", "x": x, "y": numbers(curve.oracle[chosen])},
            {"name": "random", "kind": "guide", "x": [0, 100], "y": numbers([curve.random] * 2)},
        ],
    }


def _sigma_error(forces: np.ndarray, std: np.ndarray, target: np.ndarray) -> Plot:
    count = int(np.clip(forces.size // 20, 2, 12))
    sigma, rmse = binned_errors(forces, std, target, count)
    note = f"Force components in {count} equal bins; calibrated error bars lie on the diagonal."
    return {
        "kind": "sigma",
        "note": note,
        "summary": f"Root-mean-square error against sigma. {note}",
        "x": {"label": "RMS sigma of the bin (eV/Å)", "log": True},
        "y": {"label": "RMSE of the bin (eV/Å)", "log": True},
        "equal": True,
        "diagonal": "RMSE = sigma",
        "series": [
            {"name": "bins", "kind": "line", "x": numbers(sigma), "y": numbers(rmse)},
        ],
    }


def _sigma(std: np.ndarray | None, chosen: np.ndarray) -> dict[str, Any]:
    return {} if std is None else {"sigma": numbers(std.ravel()[chosen]), "bars": True}


def _thinned(count: int, most: int = MAX_POINTS) -> np.ndarray:
    """Indices, evenly spaced where there are too many."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _left_out(values: np.ndarray, chosen: np.ndarray) -> str:
    if len(chosen) == len(values):
        return ""
    return f" {len(chosen)} of {len(values)} points are drawn."
