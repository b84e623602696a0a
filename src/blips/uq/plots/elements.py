"""Metrics by chemical element."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from blips.errors import InputError
from blips.uq.bootstrap import Interval
from blips.uq.checks import FloatArray
from blips.uq.plots.style import (
    COLOURS,
    IDEAL_DASH,
    INK,
    TEXT_SIZE,
    checked_models,
    dress,
    new_figure,
)


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
    checked_models(models)
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
        axes.axhline(ideal, color=INK, linewidth=1.0, linestyle=IDEAL_DASH, label="ideal")
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


def _bars(values: list[Interval | float]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Split values into heights and the lengths of their intervals below and above."""
    intervals = [v if isinstance(v, Interval) else Interval(float(v)) for v in values]
    heights = np.array([i.value for i in intervals])
    low = np.array([i.value if i.low is None else i.low for i in intervals])
    high = np.array([i.value if i.high is None else i.high for i in intervals])
    return heights, np.maximum(heights - low, 0.0), np.maximum(high - heights, 0.0)
