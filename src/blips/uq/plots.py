"""Draw errors and standard deviations; every function returns a matplotlib Figure.

Figures are built as objects, without pyplot and without touching rcParams, so they need no display
and leave no global state behind. Save one with ``figure.savefig("name.pdf")`` (or .png, .svg).
Colours are the Okabe-Ito set, which colour-blind readers can tell apart; models also differ in dash
pattern. Functions for several models take a mapping from label to arrays, drawn in its order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, MaxNLocator

from blips.errors import InputError
from blips.uq.bootstrap import Interval
from blips.uq.checks import FloatArray, IntArray, checked_pair, positive_array, same_shape
from blips.uq.metrics import binned_errors, ece_of_curve, reliability_curve
from blips.uq.ranking import rejection_curve

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), "-", (0, (5, 1.5)))
INK, GUIDE, FAINT = "#222222", "#7f7f7f", "#e6e6e6"
TEXT_SIZE, LABEL_SIZE, DPI = 9.0, 10.0, 150
IDEAL = {"color": INK, "linewidth": 1.0, "linestyle": (0, (4, 2))}


def plot_parity(
    mean: npt.ArrayLike,
    std: npt.ArrayLike | None,
    target: npt.ArrayLike,
    *,
    quantity: str = "force component",
    unit: str = "eV/Å",
    max_points: int = 2000,
) -> Figure:
    """Draw predictions against references with error bars of one std, and the errors below.

    Args:
        mean: predictions, any shape.
        std: standard deviations, same shape; None draws no error bars.
        target: references, same shape.
        quantity: name for the axes.
        unit: unit for the axes.
        max_points: draw at most so many points, evenly spaced in the order of the reference;
            the figures in the legend always refer to all of them.
    """
    mean, target = checked_pair(mean, target)
    bars = None
    if std is not None:
        bars = positive_array("std", std)
        same_shape(mean=mean, std=bars, target=target)
    mean, target = mean.ravel(), target.ravel()
    error = mean - target
    chosen = _thinned(np.argsort(target, kind="stable"), max_points)
    bars = None if bars is None else bars.ravel()[chosen]
    figure = new_figure(4.4, 5.4)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1.0, 0.3])
    _draw_points(top, target[chosen], mean[chosen], bars)
    _draw_points(bottom, target[chosen], error[chosen], bars)
    limits = _square_limits(mean, target)
    top.plot(limits, limits, zorder=3, **IDEAL)
    bottom.axhline(0.0, zorder=3, **IDEAL)
    top.set(xlim=limits, ylim=limits)
    bottom.yaxis.set_major_locator(MaxNLocator(5, symmetric=True))
    reach = 1.08 * float(np.max(np.abs(error[chosen]) + (0.0 if bars is None else bars)))
    bottom.set_ylim(-reach or -1.0, reach or 1.0)
    text = f"MAE {np.mean(np.abs(error)):.3g} {unit}, n = {len(error)}"
    text += "" if bars is None else "\nbars: one predicted std"
    top.text(0.03, 0.97, text, transform=top.transAxes, va="top", fontsize=TEXT_SIZE)
    dress(top, "", f"predicted {quantity} ({unit})")
    dress(bottom, f"reference {quantity} ({unit})", f"error ({unit})")
    figure.align_ylabels()
    return figure


def plot_reliability(
    models: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]],
) -> Figure:
    """Draw observed against predicted cumulative probability for one or several models.

    Args:
        models: label -> (mean, std, target), arrays of one shape. The legend gives each ECE.
    """
    _check_models(models)
    figure = new_figure(4.2, 4.2)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=GUIDE, linewidth=1.0, label="ideal")
    for (label, arrays), colour, dash in zip(models.items(), COLOURS, DASHES, strict=False):
        p, p_obs = reliability_curve(*arrays)
        name = f"{label} (ECE {float(ece_of_curve(p_obs)):.3f})"
        axes.plot(p, p_obs, color=colour, linestyle=dash, linewidth=1.8, label=name)
        if len(models) == 1:
            axes.fill_between(p, p, p_obs, color=colour, alpha=0.15, linewidth=0)
    ticks = np.linspace(0.0, 1.0, 6)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=ticks, yticks=ticks)
    dress(axes, "predicted probability $p$", r"fraction of targets below the $p$-quantile")
    add_legend(axes, "upper left")
    return figure


def plot_std_error(
    mean: npt.ArrayLike,
    std: npt.ArrayLike,
    target: npt.ArrayLike,
    *,
    quantity: str = "force component",
    unit: str = "eV/Å",
    n_bins: int = 10,
    max_points: int = 4000,
) -> Figure:
    """Draw errors against predicted std on logarithmic axes, with binned RMSE over RMS std.

    A calibrated model has its binned points on the diagonal. Bins hold equal counts; see
    blips.uq.metrics.binned_errors. Errors of exactly zero cannot be shown on a logarithmic axis.

    Args:
        mean: predictions, any shape.
        std: standard deviations, same shape.
        target: references, same shape.
        quantity: name for the axes.
        unit: unit for the axes.
        n_bins: number of bins.
        max_points: draw at most so many single errors, evenly spaced in the order of std.
    """
    rms_std, rmse = binned_errors(mean, std, target, n_bins)
    flat_std = np.ravel(np.asarray(std, dtype=np.float64))
    error = np.abs(np.subtract(target, mean)).ravel()
    if not np.any(error > 0.0):
        raise InputError("all errors are zero; expected errors for a logarithmic axis.")
    order = _thinned(np.argsort(flat_std, kind="stable"), max_points)
    order = order[error[order] > 0.0]
    figure = new_figure(4.4, 4.0)
    axes = figure.subplots()
    axes.scatter(
        flat_std[order],
        error[order],
        s=8,
        color=COLOURS[5],
        alpha=float(np.clip(400.0 / max(len(order), 1), 0.15, 0.7)),
        linewidth=0,
        label="single errors",
        rasterized=len(order) > 1000,
    )
    ends = np.array([flat_std.min() / 1.3, flat_std.max() * 1.3])
    axes.plot(ends, ends, label="ideal: RMSE = std", **IDEAL)
    shown = rmse > 0.0
    axes.plot(
        rms_std[shown],
        rmse[shown],
        color=COLOURS[1],
        marker="o",
        markersize=5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        linewidth=1.6,
        label=f"RMSE in {n_bins} equal bins",
    )
    low = max(np.percentile(error[error > 0.0], 0.5), 1e-4 * error.max())
    top = 1.5 * max(float(error.max()), float(ends[1]))
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=(min(low, ends[0]), top))
    axes.xaxis.set_minor_formatter(LogFormatterSciNotation(minor_thresholds=(0.5, 0.2)))
    dress(axes, f"predicted std of {quantity} ({unit})", f"absolute error ({unit})")
    add_legend(axes, "lower right")
    return figure


def plot_rejection(
    models: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]],
    *,
    quantity: str = "force error norm",
    unit: str = "eV/Å",
) -> Figure:
    """Draw the mean error that remains when the items of largest std are dropped.

    Each model has its own random line and oracle (they depend on its errors); with several models
    both are drawn thin in the model's colour. Curves end at 99 %, where one in a hundred is left;
    the areas in the legend are those of blips.uq.ranking.RejectionCurve, normalised.

    Args:
        models: label -> (std [n], non-negative error [n]).
        quantity: name of the error.
        unit: its unit.
    """
    _check_models(models)
    figure = new_figure(4.6, 3.8)
    axes = figure.subplots()
    for (label, arrays), colour, dash in zip(models.items(), COLOURS, DASHES, strict=False):
        curve = rejection_curve(*arrays)
        shown = curve.fraction <= 0.99  # the mean over the last few items is noise
        percent = 100.0 * curve.fraction[shown]
        thin = {"color": GUIDE if len(models) == 1 else colour, "linewidth": 0.9, "alpha": 0.8}
        name = f"{label} (area {curve.auc_normalised:.2f})"
        line = {"color": colour, "linestyle": dash, "linewidth": 1.8, "zorder": 3}
        axes.plot(percent, curve.error[shown], label=name, **line)
        axes.axhline(curve.random, linestyle=IDEAL["linestyle"], **thin)
        axes.plot(percent, curve.oracle[shown], **thin)
    guide = {"color": GUIDE, "linewidth": 0.9}
    axes.plot([], [], linestyle=IDEAL["linestyle"], label="random (area 1)", **guide)
    axes.plot([], [], label="oracle (area 0)", **guide)
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0.0)
    axes.margins(y=0.08)
    dress(axes, "dropped, largest std first (%)", f"mean remaining {quantity} ({unit})")
    add_legend(axes, "lower left")
    return figure


def plot_elements(
    models: Mapping[str, Mapping[str, Interval | float]],
    *,
    quantity: str = "force MAE",
    unit: str = "eV/Å",
    ideal: float | None = None,
) -> Figure:
    """Draw one metric per chemical element as bars, with confidence intervals where given.

    Args:
        models: label -> {symbol: value}, for instance
            {"BLIP": {symbol: table["mae"] for symbol, table in evaluation.per_element.items()}}.
            An element that a model lacks has no bar.
        quantity: name of the metric.
        unit: its unit; empty for a pure number.
        ideal: draw a line at this value, for instance 1 for ZMS.
    """
    _check_models(models)
    symbols = list(dict.fromkeys(symbol for values in models.values() for symbol in values))
    if not symbols:
        raise InputError("no element has a value; expected {label: {symbol: value}}.")
    bar_width = 0.8 / len(models)
    width = float(np.clip(1.6 + 0.55 * len(symbols) * len(models) ** 0.5, 3.4, 10.0))
    figure = new_figure(width, 3.4)
    axes = figure.subplots()
    for index, ((label, values), colour) in enumerate(zip(models.items(), COLOURS, strict=False)):
        present = [i for i, symbol in enumerate(symbols) if symbol in values]
        heights, below, above = _bars([values[symbols[i]] for i in present])
        x = np.array(present) + (index - 0.5 * (len(models) - 1)) * bar_width
        axes.bar(x, heights, 0.92 * bar_width, color=colour, label=label, linewidth=0)
        axes.errorbar(
            x, heights, yerr=[below, above], fmt="none", ecolor=INK, elinewidth=1.0, capsize=2.5
        )
    if ideal is not None:
        axes.axhline(ideal, label="ideal", **IDEAL)
    axes.set_xticks(range(len(symbols)), symbols)
    dress(axes, "element", f"{quantity} ({unit})" if unit else quantity)
    axes.grid(False, axis="x")
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.12)
    if len(models) > 1 or ideal is not None:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=max(1, int(width / 1.9)),  # as many columns as fit above the axes
            fontsize=TEXT_SIZE - 0.5,
            frameon=False,
        )
    return figure


# ---------------------------------------------------------------------------------- shared style
def new_figure(width: float, height: float) -> Figure:
    """Return an empty white figure of that size in inches."""
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")


def dress(axes: Axes, x_label: str, y_label: str) -> None:
    """Label and style axes; ticks are set here because they are made lazily when drawing."""
    axes.set_xlabel(x_label, fontsize=LABEL_SIZE, color=INK)
    axes.set_ylabel(y_label, fontsize=LABEL_SIZE, color=INK)
    axes.tick_params(which="both", direction="out", labelsize=TEXT_SIZE, color=INK, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(color=INK, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.grid(True, which="major", color=FAINT, linewidth=0.7)


def add_legend(axes: Axes, location: Literal["upper left", "lower left", "lower right"]) -> None:
    """Add a legend whose markers are opaque, however faint the points are."""
    legend = axes.legend(
        loc=location, fontsize=TEXT_SIZE - 0.5, frameon=True, handlelength=2.2, borderpad=0.5
    )
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1.0)
    legend.get_frame().set(facecolor="white", edgecolor="none", alpha=0.85)


def _check_models(models: Mapping[str, object]) -> None:
    """Raise InputError unless models is a mapping of one to six labels, one colour each."""
    if not isinstance(models, Mapping) or not models:
        raise InputError("models must be a non-empty mapping from label to arrays, {label: (...)}.")
    if len(models) > len(COLOURS):
        raise InputError(
            f"{len(models)} models in one figure; expected at most {len(COLOURS)}, so that they "
            "can be told apart. Draw several figures."
        )


def _draw_points(axes: Axes, x: FloatArray, y: FloatArray, bars: FloatArray | None) -> None:
    """Draw points [n] with error bars [n], fainter the more there are."""
    crowd = float(np.clip(300.0 / len(x), 0.25, 1.0))
    if bars is not None:
        faint = {"ecolor": COLOURS[5], "elinewidth": 0.8, "alpha": max(crowd, 0.4), "zorder": 1}
        axes.errorbar(x, y, yerr=bars, fmt="none", **faint)
    axes.scatter(x, y, s=10, color=COLOURS[0], alpha=max(crowd, 0.45), linewidth=0, zorder=2)


def _bars(values: list[Interval | float]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Split values into heights and the lengths of their intervals below and above."""
    intervals = [v if isinstance(v, Interval) else Interval(float(v)) for v in values]
    heights = np.array([i.value for i in intervals])
    low = np.array([i.value if i.low is None else i.low for i in intervals])
    high = np.array([i.value if i.high is None else i.high for i in intervals])
    return heights, np.maximum(heights - low, 0.0), np.maximum(high - heights, 0.0)


def _square_limits(*arrays: FloatArray) -> tuple[float, float]:
    """Return limits that hold all values of all arrays with a small margin."""
    low, high = min(a.min() for a in arrays), max(a.max() for a in arrays)
    margin = 0.04 * (high - low) or max(1e-3, 0.04 * abs(high))
    return float(low - margin), float(high + margin)


def _thinned(order: IntArray, max_points: int) -> IntArray:
    """Keep at most ``max_points`` entries of ``order``, evenly spaced, its ends among them."""
    if len(order) <= max_points:
        return order
    return order[np.linspace(0, len(order) - 1, max_points).astype(np.int64)]
