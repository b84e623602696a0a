"""Draw docs/assets/reliability.png: how often the truth lies within the error bars, near and far.

Reads what the study errorbars found, results/errorbars/default/{set}-{method}-seed{k}.json. For
every nominal level it has the share of force components within the central interval of that level.
A curve is the mean over the sets, each set being the mean over its seeds; the band spans the
sets. All methods of a panel are averaged over the same sets: those that every one of them has.

    python -m recipes.reliability_figure
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from blips.uq.figures import COLOURS, DASHES, GUIDE, TEXT_SIZE, add_legend, dress, new_figure
from studies.errorbars.run import LEVELS
from studies.errorbars.study import METHODS

ROOT = Path(__file__).parents[1]
RESULTS, OUTPUT = ROOT / "results/errorbars/default", ROOT / "docs/assets/reliability.png"
SHOWN = ("conditioned", "deep_ensemble", "llpr")
BANDS = SHOWN[:2]  # more of them would hide each other
PANELS = {"near": "near the training data", "far": "far from the training data"}
LARGEST_FILE = 150_000  # bytes: it is in the repository

Curves = dict[str, dict[str, np.ndarray]]  # method -> set -> shares [levels]


def read_curves(folder: Path, where: str) -> Curves:
    """Read curves of the shown methods, means over seeds; only sets that all of them have."""
    found: dict[str, dict[str, list[list[float]]]] = {method: {} for method in SHOWN}
    for path in sorted(folder.glob("*-seed*.json")):
        data, method = _set_and_method(path.stem.rpartition("-seed")[0])
        shares = json.loads(path.read_text()).get("details", {}).get("covered", {}).get(where)
        if method in found and shares is not None:
            if len(shares) != len(LEVELS):
                raise SystemExit(f"{path} has {len(shares)} levels, expected {len(LEVELS)}")
            found[method].setdefault(data, []).append(shares)
    present = {method: by_set for method, by_set in found.items() if by_set}
    if not present:
        return {}
    common = sorted(set.intersection(*(set(by_set) for by_set in present.values())))
    dropped = sorted({data for by_set in present.values() for data in by_set} - set(common))
    if dropped:
        print(f"{where}: without {', '.join(dropped)}, which not all have", file=sys.stderr)
    return {
        method: {data: np.mean(by_set[data], axis=0) for data in common}
        for method, by_set in present.items()
    }


def _set_and_method(name: str) -> tuple[str, str]:
    """Split "acac-100-conditioned" into ("acac-100", "conditioned")."""
    data, _, method = name.rpartition("-")
    return data, method


def draw(folder: Path) -> Figure:
    """Draw two panels of one size, near and far."""
    panels = {where: read_curves(folder, where) for where in PANELS}
    if not any(by_set for curves in panels.values() for by_set in curves.values()):
        raise SystemExit(f"no set in {folder} has results of all methods that it has results of")
    figure = new_figure(7.4, 3.9)
    both = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, (where, curves) in zip(both, panels.items(), strict=True):
        _draw_panel(axes, curves)
        count = len(next(iter(curves.values()), {}))
        sets = "1 set" if count == 1 else f"{count} sets"
        axes.set_title(f"{PANELS[where]} ({sets})", fontsize=TEXT_SIZE + 1.0, loc="left")
        dress(axes, "nominal level of the interval", "")
    dress(both[0], "nominal level of the interval", "share of force components within it")
    add_legend(both[0], "upper left")
    both[1].text(0.02, 0.95, "error bars too large", fontsize=TEXT_SIZE, color=GUIDE)
    return figure


def _draw_panel(axes: Axes, curves: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    levels = np.array([0.0, *LEVELS])
    axes.plot([0, 1], [0, 1], color=GUIDE, linewidth=1.0, label="ideal")
    for number, method in enumerate(SHOWN):
        by_set = curves.get(method, {})
        if not by_set:
            continue
        shares = np.array([[0.0, *curve] for curve in by_set.values()])  # [sets, levels]
        colour = COLOURS[number]
        if method in BANDS:
            low, high = shares.min(axis=0), shares.max(axis=0)
            axes.fill_between(levels, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(
            levels,
            shares.mean(axis=0),
            color=colour,
            linestyle=DASHES[number],
            linewidth=2.4 if number == 0 else 1.6,
            label=METHODS[method].label,
            zorder=4 - number / 10,
        )
    ticks = np.linspace(0.0, 1.0, 6)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=ticks, yticks=ticks)
    axes.text(0.98, 0.03, "error bars too small", ha="right", fontsize=TEXT_SIZE, color=GUIDE)


def save_small(figure: Figure, path: Path) -> None:
    """Save as PNG with 128 colours: it is kept in the repository."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(128)
    few.save(path, optimize=True)
    size = path.stat().st_size
    if size > LARGEST_FILE:
        raise SystemExit(f"{path} has {size} bytes, more than {LARGEST_FILE}")
    print(f"{path}, {size / 1e3:.0f} kB")


def main() -> None:
    """Read the results and write the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    save_small(draw(options.results), options.output)


if __name__ == "__main__":
    main()
