"""One figure for each kind of property."""

from typing import TYPE_CHECKING

import numpy as np

from blips.properties.result import Properties

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, GREY = "#1f4e79", "#9aa5b1"


def plot(found: Properties) -> "Figure":
    """Draw the curves of a kind, and a panel for each quantity that is a number."""
    from matplotlib.figure import Figure

    panels = [(name, draw) for name, draw in CURVES.items() if name == found.kind or name in found]
    panels += [(name, _number) for name, one in found.items() if np.ndim(one.value) == 0]
    figure = Figure(figsize=(3.2 * len(panels), 2.8), layout="constrained")  # inches
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for place, (name, draw) in zip(axes, panels, strict=True):
        draw(place, found, name)
        place.spines[["top", "right"]].set_visible(False)
    return figure


def _number(axes: "Axes", found: Properties, name: str) -> None:
    """Draw members as strokes of a histogram, value and std above them."""
    one = found[name]
    value, std = float(one.value), float(one.std)
    axes.axvspan(value - std, value + std, color=BLUE, alpha=0.15, lw=0)
    axes.axvline(value, color=BLUE, lw=2)
    axes.plot(one.members, np.linspace(0.1, 0.6, len(one.members)), "o", color=GREY, ms=4)
    label = f"{one.name.replace('_', ' ')} ({one.units})".replace(" ()", "")
    axes.set(ylim=(0, 1), yticks=[], xlabel=label)
    axes.set_title(f"{value:.4g} ± {std:.2g}", fontsize=10)


def _energies(axes: "Axes", found: Properties, name: str) -> None:
    """Draw energies of the plain model and its members, each above a zero of its own."""
    x, xlabel, zero, of_zero = ENERGIES[name]
    energies = found.details["energies"]
    at = found.details.get(x, range(len(energies)))
    for curve in found.details.get("member_energies", ()):
        axes.plot(at, curve - zero(curve), color=GREY, lw=0.7)
    axes.plot(at, energies - zero(energies), "o-", color=BLUE, lw=2, ms=4)
    axes.set(xlabel=xlabel, ylabel=f"energy above {of_zero} (eV)")


def _bands(axes: "Axes", found: Properties, name: str) -> None:
    x, one = found.details["band_axis"], found[name]
    for mode, std in zip(np.transpose(one.value), np.transpose(one.std), strict=True):
        axes.fill_between(x, mode - std, mode + std, color=BLUE, alpha=0.15, lw=0)
        axes.plot(x, mode, color=BLUE, lw=1)
    axes.set(xlim=(x[0], x[-1]), ylabel="frequency (THz)")
    axes.set_xticks(found.details["band_marks"], found.details["band_labels"])
    axes.grid(axis="x", lw=0.5)


def _with_std(axes: "Axes", found: Properties, name: str) -> None:
    """Draw a quantity with its std over an entry of the details."""
    x, xlabel, ylabel = WITH_STD[name]
    one, at = found[name], found.details[x]
    axes.fill_between(at, one.value - one.std, one.value + one.std, color=BLUE, alpha=0.2, lw=0)
    axes.plot(at, one.value, color=BLUE, lw=1.5)
    axes.set(xlabel=xlabel, ylabel=ylabel)


ENERGIES = {
    "equation_of_state": ("volumes", "volume (Å³)", np.min, "its minimum"),
    "barrier": ("image", "image", lambda curve: curve[0], "the first"),
}
WITH_STD = {
    "dos": ("frequencies", "frequency (THz)", "states per THz"),
    "heat_capacity": ("temperatures", "temperature (K)", "heat capacity (J/K/mol)"),
    "radial_distribution": ("distances", "distance (Å)", "g(r)"),
    "displacement": ("lags", "time (fs)", "mean squared displacement (Å²)"),
}
CURVES = {  # by kind or quantity
    **dict.fromkeys(ENERGIES, _energies),
    "bands": _bands,
    **dict.fromkeys(WITH_STD, _with_std),
}
