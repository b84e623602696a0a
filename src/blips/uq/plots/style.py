"""Colours, axes and small decisions that all figures share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blips.errors import InputError
from blips.uq.checks import FloatArray, IntArray

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), "-", (0, (5, 1.5)))
IDEAL_DASH = (0, (4, 2))
INK, GUIDE, FAINT = "#222222", "#7f7f7f", "#e6e6e6"
TEXT_SIZE, LABEL_SIZE, DPI = 9.0, 10.0, 150


def new_figure(width: float, height: float) -> Figure:
    """Return an empty white figure of that size in inches."""
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")


def dress(axes: Axes, x_label: str, y_label: str) -> None:
    """Label and style axes; ticks are set here because they are made lazily when drawing."""
    axes.set_xlabel(x_label, fontsize=LABEL_SIZE, color=INK)
    axes.set_ylabel(y_label, fontsize=LABEL_SIZE, color=INK)
    axes.tick_params(which="both", direction="out", labelsize=TEXT_SIZE, color=INK, labelcolor=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(INK)
        axes.spines[side].set_linewidth(0.8)
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


def checked_models(models: Mapping[str, object]) -> None:
    """Raise InputError unless models is a mapping of one to six labels, one colour each."""
    if not isinstance(models, Mapping) or not models:
        raise InputError("models must be a non-empty mapping from label to arrays, {label: (...)}.")
    if len(models) > len(COLOURS):
        raise InputError(
            f"{len(models)} models in one figure; expected at most {len(COLOURS)}, so that they "
            "can be told apart. Draw several figures."
        )


def square_limits(*arrays: FloatArray) -> tuple[float, float]:
    """Return limits that hold all values of all arrays with a small margin."""
    low, high = min(a.min() for a in arrays), max(a.max() for a in arrays)
    margin = 0.04 * (high - low) or max(1e-3, 0.04 * abs(high))
    return float(low - margin), float(high + margin)


def thinned(order: IntArray, max_points: int) -> IntArray:
    """Keep at most ``max_points`` entries of ``order``, evenly spaced, its ends among them."""
    if len(order) <= max_points:
        return order
    return order[np.linspace(0, len(order) - 1, max_points).astype(np.int64)]
