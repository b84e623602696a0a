"""Figures of several curves with error bars, in panels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL = (4.2, 3.2)  # inches
COLUMNS = 2


@dataclass(frozen=True)
class Curve:
    """A line of the figure: (x, y, spread) of its points; None where there is no spread."""

    label: str
    points: Sequence[tuple[float, float, float | None]]


def plot_curves(
    panels: Mapping[str, Sequence[Curve]], *, x_label: str, logarithmic: bool = False
) -> "Figure":
    """Plot panels of curves, two in a row, titled with their y axes.

    Args:
        panels: label of the y axis -> curves; at most six, told apart by colour and dash.
        x_label: of all panels.
        logarithmic: x axis, with a tick at every x.
    """
    from blips.uq.figures import COLOURS, DASHES, TEXT_SIZE, dress, new_figure

    count = len(panels)
    rows = -(-count // COLUMNS)
    columns = min(count, COLUMNS)
    figure = new_figure(PANEL[0] * columns, PANEL[1] * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    labels = list(dict.fromkeys(curve.label for panel in panels.values() for curve in panel))
    for axes, (y_label, curves) in zip(grid, panels.items(), strict=False):
        for curve in curves:
            look = labels.index(curve.label) % len(COLOURS)
            x, y, spread = zip(*curve.points, strict=True)
            axes.errorbar(
                x,
                y,
                yerr=[value or 0.0 for value in spread],
                color=COLOURS[look],
                linestyle=DASHES[look],
                marker="o",
                markersize=4,
                capsize=3,
                label=curve.label,
            )
        if logarithmic:
            axes.set_xscale("log")
            ticks = sorted({x for curve in curves for x, *_ in curve.points})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
        dress(axes, x_label, y_label)
    for axes in grid[count:]:
        axes.set_visible(False)
    handles, names = grid[0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=3, fontsize=TEXT_SIZE, frameon=False
    )
    return figure
