"""Plots of errors and standard deviations, as data: for the page of a report and for matplotlib.

Every function returns a `Plot`; `plot.figure()` draws it, and the pages of `blips.report` draw the
same data in the browser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from blips.errors import InputError
from blips.uq.checks import IntArray, checked_prediction
from blips.uq.metrics import binned_errors, ece_of_curve, rejection_curve, reliability_curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from blips.prediction import Prediction
    from blips.uq.assess import References

Series = dict[str, Any]
Arrays = tuple[ArrayLike, ArrayLike, ArrayLike]  # mean, std, target

MAX_POINTS = 1500


@dataclass(frozen=True)
class Plot:
    """One plot.

    A series has a name, a kind ("points", "line" or "guide"), x and y; points may have a std, drawn
    as error bars, and the structure, atom and component they belong to.
    """

    what: str  # is drawn, for screen readers
    note: str  # what it says, in sentences
    x: Mapping[str, Any]  # axis, {"label": ...} and, where it applies, "log" and "range"
    y: Mapping[str, Any]
    series: Sequence[Series]
    equal: bool = False  # whether both axes have the same range
    diagonal: str = ""  # name of the line x = y, where there is one

    def figure(self) -> Figure:
        """Draw with matplotlib; save with ``figure.savefig("name.pdf")`` (or .png, .svg)."""
        from blips.uq.figures import draw

        return draw(self)


def numbers(values: Any, digits: int = 5) -> list[float | None]:
    """Return numbers for JSON, to some significant digits; None where not finite."""
    flat = np.asarray(values, dtype=float).ravel()
    return [float(f"{v:.{digits}g}") if np.isfinite(v) else None for v in flat]


def line(name: str, x: Any, y: Any, kind: Literal["line", "guide", "points"] = "line") -> Series:
    """Return a series of x and y."""
    return {"name": name, "kind": kind, "x": numbers(x), "y": numbers(y)}


# --------------------------------------------------------------------------------- what is drawn
def parity(
    mean: ArrayLike,
    std: ArrayLike | None,
    target: ArrayLike,
    *,
    quantity: str = "force components",
    unit: str = "eV/Å",
    about: Mapping[str, IntArray] | None = None,
    note: str = "",
) -> Plot:
    """Plot predictions against references of any shape, with error bars of one std.

    `about` has the structure, atom and component of each value, for the page; `note` is added to
    the plot's own. At most MAX_POINTS are drawn, evenly spaced; the MAE is that of all.
    """
    stds = np.ones(np.shape(mean)) if std is None else std
    mean, stds, target = checked_prediction(mean, stds, target)
    chosen = _thinned(mean.size, MAX_POINTS)
    points = line(quantity, target.ravel()[chosen], mean.ravel()[chosen], "points")
    if std is not None:
        points["std"] = numbers(stds.ravel()[chosen])
    points |= {name: values[chosen].tolist() for name, values in (about or {}).items()}
    thinned = "" if len(chosen) == mean.size else f" {len(chosen)} of {mean.size} are drawn."
    return Plot(
        f"{_sentence(quantity)}: predicted against reference, {len(chosen)} points",
        f"MAE {np.mean(np.abs(mean - target)):.4g} {unit}.{note}{thinned}",
        x={"label": f"reference ({unit})"},
        y={"label": f"predicted ({unit})"},
        series=[points],
        equal=True,
        diagonal="predicted = reference",
    )


def reliability(models: Mapping[str, Arrays]) -> Plot:
    """Plot observed against predicted cumulative probability, by the label of each model."""
    series: list[Series] = []
    for label, arrays in models.items():
        p, p_obs = reliability_curve(*arrays)
        series.append(line(f"{label} (ECE {ece_of_curve(p_obs):.3f})", p, p_obs))
    return Plot(
        "Observed against predicted cumulative probability",
        f"{_sentence('; '.join(one['name'] for one in series))}.",
        x={"label": "predicted probability p", "range": [0, 1]},
        y={"label": "fraction below the p-quantile", "range": [0, 1]},
        series=series,
        diagonal="ideal",
    )


def std_error(
    mean: ArrayLike,
    std: ArrayLike,
    target: ArrayLike,
    *,
    quantity: str = "force components",
    unit: str = "eV/Å",
) -> Plot:
    """Plot binned RMSE against RMS std on logarithmic axes; calibrated bins are on the diagonal.

    There are 2 to 12 bins of equal count (`metrics.binned_errors`).
    """
    count = int(np.clip(np.size(mean) // 20, min(2, np.size(mean)), 12))
    rms_std, rmse = binned_errors(mean, std, target, count)
    if not np.any(rmse > 0.0):
        raise InputError("all errors are zero; expected errors for a logarithmic axis.")
    where = "calibrated error bars lie on the diagonal"
    return Plot(
        "Root-mean-square error against std",
        f"{_sentence(quantity)} in {count} equal bins; {where}.",
        x={"label": f"RMS std of the bin ({unit})", "log": True},
        y={"label": f"RMSE of the bin ({unit})", "log": True},
        series=[line("bins", rms_std, rmse)],
        equal=True,
        diagonal="RMSE = std",
    )


def rejection(models: Mapping[str, Arrays]) -> Plot:
    """Plot the mean force error that remains when the items of largest std are dropped.

    Curves end at 99 %, where one in a hundred is left; areas are normalised as in
    `metrics.RejectionCurve`. One model is shown with random dropping and an oracle. `models` has
    arrays [n, 3] by label; their norms are ranked.
    """
    series, areas = [], []
    for label, arrays in models.items():
        mean, std, target = map(np.asarray, arrays)
        curve = rejection_curve(*(np.linalg.norm(one, axis=1) for one in (std, mean - target)))
        chosen = np.flatnonzero(curve.fraction <= 0.99)  # the mean over the last few is noise
        chosen = chosen[_thinned(len(chosen), 200)]
        percent = 100.0 * curve.fraction[chosen]
        name = label if len(models) > 1 else "by std"
        series.append(line(name, percent, curve.error[chosen]))
        areas.append(f"{name}: area {curve.auc_normalised:.2f}")
        if len(models) == 1:
            series.append(line("oracle", percent, curve.oracle[chosen]))
            series.append(line("random", [0, 100], [curve.random] * 2, "guide"))
    return Plot(
        "Mean force error of what remains when the most uncertain is dropped",
        f"{_sentence('; '.join(areas))}. Random is 1, an oracle 0.",
        x={"label": "dropped, largest std first (%)", "range": [0, 100]},
        y={"label": "mean remaining force error (eV/Å)"},
        series=series,
    )


def prediction_plots(
    predictions: Mapping[str, Prediction], references: References
) -> dict[str, Plot]:
    """Make all plots of labelled structures, by name; what one model can show is of the first."""
    plots: dict[str, Plot] = {}
    prediction, several = next(iter(predictions.values())), len(predictions) > 1
    energy, forces = (references.match(prediction, name) for name in ("energy", "forces"))
    compared: dict[str, Arrays] = {}
    if forces is not None:
        about = _places(np.flatnonzero(forces.chosen), forces.n_atoms)
        plots["parity_forces"] = parity(*forces[:3], about=about)
        if forces.std is not None:
            plots["std_error"] = std_error(forces.mean, forces.std, forces.target)
    for label, one in predictions.items():
        found = references.match(one, "forces")
        if found is not None and found.std is not None:
            compared[label if several else "force components"] = found.mean, found.std, found.target
    if compared:
        plots["rejection"] = rejection(compared)
    if energy is not None:
        shift = float(energy.target.mean())  # axes show differences
        plots["parity_energy"] = parity(
            energy.mean - shift,
            energy.std,
            energy.target - shift,
            quantity="energies",
            unit="eV",
            about={"structure": np.flatnonzero(energy.chosen)},
            note=f" Energies from their mean, {shift:.6g} eV.",
        )
        if energy.std is not None and not several:
            compared["energies"] = energy.mean, energy.std, energy.target
    if compared:
        plots["reliability"] = reliability(compared)
    if forces is None and prediction.forces_total_std is not None:
        plots["std_force"] = std_force(prediction)
    return plots


def std_force(prediction: Prediction) -> Plot:
    """Plot the std of each atom's force against the force itself, norms; it needs no labels."""
    names = ("forces", "forces_total_std")
    force, std = (np.linalg.norm(prediction.array(name), axis=1) for name in names)
    chosen = _thinned(len(std), MAX_POINTS)
    points = line("atoms", force[chosen], std[chosen], "points")
    places = _places(np.arange(len(prediction)), prediction.n_atoms)
    points |= {name: places[name][::3][chosen].tolist() for name in ("structure", "atom")}
    return Plot(
        "Std of the force on each atom against the force",
        f"Median {np.median(std):.3g} eV/Å, largest {std.max():.3g} eV/Å.",
        x={"label": "predicted force (eV/Å)", "log": True},
        y={"label": "std of the force (eV/Å)", "log": True},
        series=[points],
    )


def _places(structures: IntArray, counts: IntArray) -> dict[str, IntArray]:
    """Return structure, atom and component of each force component of these structures."""
    structure = np.repeat(structures, counts)  # [N']
    atom = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    component = np.tile(np.arange(3), len(atom))
    return {"structure": structure.repeat(3), "atom": atom.repeat(3), "component": component}


def training_plot(history: Sequence[Mapping[str, float]]) -> Plot | None:
    """Plot losses over the epochs; None for less than two."""
    if len(history) < 2:
        return None
    epochs = [row["epoch"] for row in history]
    names = {"train_loss": "training loss", "valid_loss": "validation loss"}
    series = [
        line(name, epochs, [row.get(key, np.nan) for row in history])
        for key, name in names.items()
        if any(key in row for row in history)
    ]
    valid = [row.get("valid_loss", np.inf) for row in history]
    best = int(np.argmin(valid))
    losses = [row[key] for row in history for key in names if key in row]
    return Plot(
        f"Loss against epoch, {len(history)} epochs",
        f"Least validation loss {valid[best]:.4g} at epoch {epochs[best]:.0f}.",
        x={"label": "epoch"},
        y={"label": "loss", "log": min(losses) > 0},
        series=series,
    )


def _sentence(text: str) -> str:
    """Begin with a capital letter, and leave the others, as in 300 K."""
    return text[:1].upper() + text[1:]


def _thinned(count: int, most: int) -> IntArray:
    """Return indices, evenly spaced where there are too many."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
