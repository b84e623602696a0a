"""One figure for each kind of property."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from blips.properties.result import Properties, Property

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = Callable[["Axes", Properties, str], None]  # of the kind or quantity of that name
BLUE, GREY = "#1f4e79", "#9aa5b1"
WIDTH, HEIGHT = 3.2, 2.8  # inches of one panel


def plot(found: Properties) -> "Figure":
    """Draw the curves of a kind, and a panel for each quantity that is a number."""
    from matplotlib.figure import Figure

    numbers = [one for one in found.values() if np.ndim(one.value) == 0]
    curves = [name for name in CURVES if name == found.kind or name in found]
    panels = len(numbers) + len(curves)
    figure = Figure(figsize=(WIDTH * panels, HEIGHT), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for place, name in zip(axes, curves, strict=False):
        CURVES[name](place, found, name)
    for place, one in zip(axes[len(curves) :], numbers, strict=True):
        _number(place, one)
    for place in axes:
        place.spines[["top", "right"]].set_visible(False)
    return figure


def _number(axes: "Axes", one: Property) -> None:
    """Draw members as strokes of a histogram, value and std above them."""
    value, std = float(one.value), float(one.std)
    axes.axvspan(value - std, value + std, color=BLUE, alpha=0.15, lw=0)
    axes.axvline(value, color=BLUE, lw=2)
    axes.plot(one.members, np.linspace(0.1, 0.6, len(one.members)), "o", color=GREY, ms=4)
    label = f"{one.name.replace('_', ' ')} ({one.units})".replace(" ()", "")
    axes.set(ylim=(0, 1), yticks=[], xlabel=label)
    axes.set_title(f"{value:.4g} ± {std:.2g}", fontsize=10)


def _energies(x: str, zero: Callable[[np.ndarray], float], xlabel: str, of_zero: str) -> Curve:
    """Draw energies of the plain model and its members, above a zero of their own, over `x`."""

    def draw(axes: "Axes", found: Properties, _: str) -> None:
        energies = found.details["energies"]
        at = found.details.get(x, range(len(energies)))
        for curve in found.details.get("member_energies", ()):
            axes.plot(at, curve - zero(curve), color=GREY, lw=0.7)
        axes.plot(at, energies - zero(energies), "o-", color=BLUE, lw=2, ms=4)
        axes.set(xlabel=xlabel, ylabel=f"energy above {of_zero} (eV)")

    return draw


def _bands(axes: "Axes", found: Properties, name: str) -> None:
    x, one = found.details["band_axis"], found[name]
    for mode, std in zip(np.transpose(one.value), np.transpose(one.std), strict=True):
        axes.fill_between(x, mode - std, mode + std, color=BLUE, alpha=0.15, lw=0)
        axes.plot(x, mode, color=BLUE, lw=1)
    axes.set(xlim=(x[0], x[-1]), ylabel="frequency (THz)")
    axes.set_xticks(found.details["band_marks"], found.details["band_labels"])
    axes.grid(axis="x", lw=0.5)


def _with_std(x: str, xlabel: str, ylabel: str) -> Curve:
    """Draw a quantity over the entry `x` of the details, with its std."""

    def draw(axes: "Axes", found: Properties, name: str) -> None:
        one, at = found[name], found.details[x]
        axes.fill_between(at, one.value - one.std, one.value + one.std, color=BLUE, alpha=0.2, lw=0)
        axes.plot(at, one.value, color=BLUE, lw=1.5)
        axes.set(xlabel=xlabel, ylabel=ylabel)

    return draw


CURVES: dict[str, Curve] = {  # by kind or quantity
    "equation_of_state": _energies("volumes", np.min, "volume (Å³)", "its minimum"),
    "bands": _bands,
    "dos": _with_std("frequencies", "frequency (THz)", "states per THz"),
    "heat_capacity": _with_std("temperatures", "temperature (K)", "heat capacity (J/K/mol)"),
    "barrier": _energies("image", lambda curve: curve[0], "image", "the first"),
    "radial_distribution": _with_std("distances", "distance (Å)", "g(r)"),
    "displacement": _with_std("lags", "time (fs)", "mean squared displacement (Å²)"),
}
