"""Whether sigmas find the errors: what remains when the most uncertain are dropped."""

from __future__ import annotations

from collections.abc import Mapping

import numpy.typing as npt
from matplotlib.figure import Figure

from blips.uq.plots.style import (
    COLOURS,
    DASHES,
    GUIDE,
    IDEAL_DASH,
    add_legend,
    checked_models,
    dress,
    new_figure,
)
from blips.uq.ranking import rejection_curve


def plot_rejection(
    models: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]],
    *,
    quantity: str = "force error norm",
    unit: str = "eV/Å",
) -> Figure:
    """Draw the mean error that remains when the most uncertain items are dropped.

    Each model has its own random line and oracle (they depend on its errors); with several models
    both are drawn thin in the model's colour. Curves end at 99 %, where one in a hundred is left;
    the areas in the legend are those of blips.uq.ranking.RejectionCurve, normalised.

    Args:
        models: label -> (uncertainty [n], non-negative error [n]).
        quantity: name of the error.
        unit: its unit.
    """
    checked_models(models)
    figure = new_figure(4.6, 3.8)
    axes = figure.subplots()
    single = len(models) == 1
    for (label, arrays), colour, dash in zip(models.items(), COLOURS, DASHES, strict=False):
        curve = rejection_curve(*arrays)
        guide = GUIDE if single else colour
        shown = curve.fraction <= 0.99  # the mean over the last few items is noise
        axes.plot(
            100.0 * curve.fraction[shown],
            curve.error[shown],
            color=colour,
            linestyle=dash,
            linewidth=1.8,
            label=f"{label} (area {curve.auc_normalised:.2f})",
            zorder=3,
        )
        axes.axhline(curve.random, color=guide, linewidth=0.9, linestyle=IDEAL_DASH, alpha=0.8)
        axes.plot(
            100.0 * curve.fraction[shown],
            curve.oracle[shown],
            color=guide,
            linewidth=0.9,
            alpha=0.8,
        )
    axes.plot([], [], color=GUIDE, linewidth=0.9, linestyle=IDEAL_DASH, label="random (area 1)")
    axes.plot([], [], color=GUIDE, linewidth=0.9, label="oracle (area 0)")
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0.0)
    axes.margins(y=0.08)
    dress(axes, "dropped, most uncertain first (%)", f"mean remaining {quantity} ({unit})")
    add_legend(axes, "lower left")
    return figure
