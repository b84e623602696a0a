"""One figure for each kind of property."""

from typing import TYPE_CHECKING

import numpy as np

from blips.errors import MissingPackageError
from blips.properties.result import Properties, Property

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, GREY = "#1f4e79", "#9aa5b1"
WIDTH, HEIGHT = 3.2, 2.8  # inches of one panel


def plot(found: Properties) -> "Figure":
    """Draw a panel for each quantity that is a number, and the curve where there is one."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "plot needs matplotlib; install it with: pip install matplotlib"
        ) from error
    numbers = [one for one in found.values() if np.ndim(one.value) == 0]
    curves = CURVES.get(found.kind)
    panels = len(numbers) + (curves is not None)
    figure = Figure(figsize=(WIDTH * panels, HEIGHT), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    if curves is not None:
        curves(axes[0], found)
    for place, one in zip(axes[panels - len(numbers) :], numbers, strict=True):
        _number(place, one)
    for place in axes:
        place.spines[["top", "right"]].set_visible(False)
    return figure


def _number(axes: "Axes", one: Property) -> None:
    """Members as a histogram of strokes, value and std above it."""
    value, std = float(one.value), float(one.std)
    axes.axvspan(value - std, value + std, color=BLUE, alpha=0.15, lw=0)
    axes.axvline(value, color=BLUE, lw=2)
    axes.plot(one.members, np.linspace(0.1, 0.6, len(one.members)), "o", color=GREY, ms=4)
    axes.set(ylim=(0, 1), yticks=[], xlabel=f"{_words(one.name)} ({one.units})".replace(" ()", ""))
    axes.set_title(f"{value:.4g} ± {std:.2g}", fontsize=10)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _equation_of_state(axes: "Axes", found: Properties) -> None:
    volumes, energies = found.details["volumes"], found.details["energies"]
    for curve in found.details.get("member_energies", ()):
        axes.plot(volumes, curve - curve.min(), color=GREY, lw=0.7)
    axes.plot(volumes, energies - energies.min(), "o-", color=BLUE, lw=2, ms=4)
    axes.set(xlabel="volume (Å³)", ylabel="energy above its minimum (eV)")


CURVES = {"equation_of_state": _equation_of_state}
