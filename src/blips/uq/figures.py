"""Draw plots with matplotlib, and what all figures of the project share in style.

Figures are built as objects, without pyplot and without touching rcParams, so they need no display
and leave no global state behind. Colours are the Okabe-Ito set, which colour-blind readers can tell
apart; models also differ in dash pattern.
"""

from __future__ import annotations

import textwrap
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blips.uq.plots import Plot, Series

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), "-", (0, (5, 1.5)))
INK, GUIDE, FAINT = "#222222", "#7f7f7f", "#e6e6e6"
TEXT_SIZE, LABEL_SIZE, DPI = 9.0, 10.0, 150
IDEAL = {"color": INK, "linewidth": 1.0, "linestyle": (0, (4, 2))}


def draw(plot: Plot) -> Figure:
    """Draw one plot."""
    figure = new_figure(4.6, 4.2)
    axes = figure.subplots()
    line = 0
    for series in plot.series:
        if series["kind"] == "points":
            _draw_points(axes, series, COLOURS[0 if len(plot.series) == 1 else 5])
        elif series["kind"] == "guide":
            axes.plot(series["x"], series["y"], label=series["name"], **IDEAL)
        else:
            style = {"color": COLOURS[line % 6], "linestyle": DASHES[line % 6], "linewidth": 1.8}
            marker = "o" if len(series["x"]) <= 20 else ""
            axes.plot(series["x"], series["y"], marker=marker, label=series["name"], **style)
            line += 1
    for axis, name in ((plot.x, "x"), (plot.y, "y")):
        axes.set(**{f"{name}scale": "log" if axis.get("log") else "linear"})
        if "range" in axis:
            axes.set(**{f"{name}lim": axis["range"]})
    if plot.equal:
        limits = [*axes.get_xlim(), *axes.get_ylim()]
        ends = min(limits), max(limits)
        axes.set(xlim=ends, ylim=ends, aspect="equal")
    if plot.diagonal:
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], label=plot.diagonal, zorder=3, **IDEAL)
        axes.set_xlim(low, high)
    axes.set_title(textwrap.fill(plot.note, 62), fontsize=TEXT_SIZE - 0.5, color=INK, loc="left")
    dress(axes, plot.x["label"], plot.y["label"])
    add_legend(axes)
    return figure


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


def add_legend(axes: Axes, location: Literal["best", "upper left"] = "best") -> None:
    """Add a legend whose markers are opaque, however faint the points are."""
    legend = axes.legend(loc=location, fontsize=TEXT_SIZE - 0.5, handlelength=2.2, borderpad=0.5)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1.0)
    legend.get_frame().set(facecolor="white", edgecolor="none", alpha=0.85)


def _draw_points(axes: Axes, series: Series, colour: str) -> None:
    """Draw points with their error bars, fainter the more there are."""
    x, y, std = series["x"], series["y"], series.get("std")
    crowd = float(np.clip(300.0 / len(x), 0.25, 1.0))
    if std is not None:
        faint = {"ecolor": COLOURS[5], "elinewidth": 0.8, "alpha": max(crowd, 0.4), "zorder": 1}
        axes.errorbar(x, y, yerr=std, fmt="none", label="one predicted std", **faint)
    style = {"color": colour, "alpha": max(crowd, 0.45), "linewidth": 0, "zorder": 2}
    axes.scatter(x, y, s=10, label=series["name"], **style)
