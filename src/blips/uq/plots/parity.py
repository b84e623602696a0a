"""Predictions against references."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from blips.uq.checks import FloatArray, checked_pair, positive_array, same_shape
from blips.uq.plots.style import (
    COLOURS,
    IDEAL_DASH,
    INK,
    TEXT_SIZE,
    dress,
    new_figure,
    square_limits,
    thinned,
)


def plot_parity(
    mean: npt.ArrayLike,
    std: npt.ArrayLike | None,
    target: npt.ArrayLike,
    *,
    quantity: str = "force component",
    unit: str = "eV/Å",
    max_points: int = 2000,
) -> Figure:
    """Draw predictions against references with one-sigma error bars, and the errors below.

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
    bars = None if std is None else positive_array("std", std)
    if bars is not None:
        same_shape(mean=mean, std=bars, target=target)
        bars = bars.ravel()
    mean, target = mean.ravel(), target.ravel()
    error = mean - target
    chosen = thinned(np.argsort(target, kind="stable"), max_points)
    bars = None if bars is None else bars[chosen]
    figure = new_figure(4.4, 5.4)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1.0, 0.3])
    label = f"MAE {np.mean(np.abs(error)):.3g} {unit}, n = {len(error)}"
    _draw_points(top, target[chosen], mean[chosen], bars)
    _draw_points(bottom, target[chosen], error[chosen], bars)
    limits = square_limits(mean, target)
    top.plot(limits, limits, color=INK, linewidth=0.9, linestyle=IDEAL_DASH, zorder=3)
    bottom.axhline(0.0, color=INK, linewidth=0.9, linestyle=IDEAL_DASH, zorder=3)
    top.set(xlim=limits, ylim=limits)
    bottom.yaxis.set_major_locator(MaxNLocator(5, symmetric=True))
    reach = 1.08 * float(np.max(np.abs(error[chosen]) + (0.0 if bars is None else bars)))
    bottom.set_ylim(-reach or -1.0, reach or 1.0)
    bars_text = "" if bars is None else "\nbars: one predicted $\\sigma$"
    top.text(0.03, 0.97, label + bars_text, transform=top.transAxes, va="top", fontsize=TEXT_SIZE)
    dress(top, "", f"predicted {quantity} ({unit})")
    dress(bottom, f"reference {quantity} ({unit})", f"error ({unit})")
    figure.align_ylabels()
    return figure


def _draw_points(axes: Axes, x: FloatArray, y: FloatArray, bars: FloatArray | None) -> None:
    """Draw points [n] with error bars [n], fainter the more there are."""
    crowd = float(np.clip(300.0 / len(x), 0.25, 1.0))
    if bars is not None:
        axes.errorbar(
            x,
            y,
            yerr=bars,
            fmt="none",
            ecolor=COLOURS[5],
            elinewidth=0.8,
            alpha=max(crowd, 0.4),
            zorder=1,
        )
    axes.scatter(x, y, s=10, color=COLOURS[0], alpha=max(crowd, 0.45), linewidth=0, zorder=2)
