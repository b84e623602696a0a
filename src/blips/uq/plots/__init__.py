"""Figures of errors and uncertainties; every function returns a matplotlib Figure.

Figures are built as objects, without pyplot and without touching rcParams, so they need no display
and leave no global state behind. Save one with ``figure.savefig("name.pdf")`` (or .png, .svg).
Colours are the Okabe-Ito set, which colour-blind readers can tell apart; models also differ in dash
pattern. Functions for several models take a mapping from label to arrays, drawn in its order.
"""

from blips.uq.plots.calibration import plot_reliability, plot_sigma_error
from blips.uq.plots.elements import plot_elements
from blips.uq.plots.parity import plot_parity
from blips.uq.plots.rejection import plot_rejection

__all__ = [
    "plot_elements",
    "plot_parity",
    "plot_rejection",
    "plot_reliability",
    "plot_sigma_error",
]
