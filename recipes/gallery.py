"""Draw the pictures of the documentation's first page: docs/assets/{stretch,strain,stop}.png.

| picture | what it shows |
|---|---|
| stretch | an N-H bond of ammonia pulled: the demo's potential, its 90 % interval, DFT |
| strain | rock salt stretched and compressed: CHGNet as released and its 90 % interval |
| stop | molecular dynamics of ammonia that is heated until the force's std passes the guard |

Needs the model of the demo (`make demo`) and the extras [dft] and [chgnet]; about two minutes.

    python -m recipes.gallery --model runs/demo/ammonia.safetensors
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from ase import Atoms, units
from ase.build import bulk
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from matplotlib.figure import Figure

import blips
from blips.data.ammonia import load_ammonia
from blips.potential import BayesianPotential
from blips.sim.pyscf import PySCF
from blips.uq.figures import COLOURS, GUIDE, TEXT_SIZE, dress, new_figure
from recipes.reliability_figure import save_small

ASSETS = Path(__file__).parents[1] / "docs/assets"
WIDTH_OF_90 = 1.645  # half of the central 90 % interval of a Gaussian, in std
SIZE = (5.0, 3.4)  # inches


def stretch(potential: BayesianPotential) -> Figure:
    """Pull one hydrogen off: energy with its 90 % interval, and what DFT says."""
    known = load_ammonia("train")
    minimum = min(known, key=lambda atoms: atoms.get_potential_energy())
    path = [_pulled(minimum, length) for length in np.linspace(0.75, 1.9, 47)]
    lengths = np.array([atoms.get_distance(0, 1) for atoms in path])
    prediction = potential.predict(path)
    lowest = prediction.array("energy").min()
    mean = prediction.array("energy") - lowest
    half = WIDTH_OF_90 * prediction.array("energy_total_std")
    dft = np.array([_dft_energy(atoms) for atoms in path[::3]])
    seen = [atoms.get_distance(0, other) for atoms in known for other in (1, 2, 3)]

    figure = new_figure(*SIZE)
    axes = figure.subplots()
    axes.axvspan(min(seen), max(seen), color=GUIDE, alpha=0.15, label="trained on", linewidth=0)
    axes.fill_between(
        lengths, mean - half, mean + half, color=COLOURS[0], alpha=0.25, label="90 % interval"
    )
    axes.plot(lengths, mean, color=COLOURS[0], label="PaiNN")
    axes.plot(lengths[::3], dft - dft.min(), "o", color=COLOURS[1], markersize=4, label="DFT")
    axes.set_ylim(-2.5, 8.0)
    dress(axes, "N-H distance (Å)", "energy above the minimum (eV)")
    axes.legend(loc="upper center", fontsize=TEXT_SIZE, frameon=False)
    return figure


def _pulled(minimum: Atoms, length: float) -> Atoms:
    """Make ammonia with its first N-H bond of that length (Å)."""
    atoms = minimum.copy()
    atoms.set_distance(0, 1, length, fix=0)
    return atoms


def _dft_energy(atoms: Atoms) -> float:
    """Compute the energy (eV) by the method that labelled the training structures."""
    labelled = atoms.copy()
    labelled.calc = PySCF()
    return float(labelled.get_potential_energy())


def strain(_: BayesianPotential) -> Figure:
    """Stretch and compress rock salt: CHGNet's energy with its 90 % interval."""
    potential = blips.load("chgnet")
    ideal = bulk("NaCl", "rocksalt", a=5.69)
    factors = np.linspace(0.78, 1.5, 37)
    cells = []
    for factor in factors:
        atoms = ideal.copy()
        atoms.set_cell(ideal.cell * factor, scale_atoms=True)
        cells.append(atoms)
    prediction = potential.predict(cells, forces=False)
    mean = prediction.array("energy") / len(ideal)
    half = WIDTH_OF_90 * prediction.array("energy_total_std") / len(ideal)

    figure = new_figure(*SIZE)
    axes = figure.subplots()
    percent = 100 * (factors - 1)
    axes.axvline(0.0, color=GUIDE, linewidth=1.0)
    axes.fill_between(
        percent, mean - half, mean + half, color=COLOURS[0], alpha=0.25, label="90 % interval"
    )
    axes.plot(percent, mean, color=COLOURS[0], label="CHGNet as released")
    dress(axes, "linear strain of NaCl (%)", "energy (eV/atom)")
    axes.legend(loc="upper center", fontsize=TEXT_SIZE, frameon=False)
    return figure


def stop(potential: BayesianPotential, limit: float = 0.5, steps: int = 1500) -> Figure:
    """Heat ammonia in steps of 100 K until the largest std of a force passes `limit` (eV/Å)."""
    atoms = load_ammonia("train")[0].copy()
    atoms.calc = blips.Calculator(potential)
    random = np.random.default_rng(3)
    MaxwellBoltzmannDistribution(atoms, temperature_K=200, rng=random)
    dynamics = Langevin(
        atoms, 0.5 * units.fs, temperature_K=200, friction=0.05 / units.fs, rng=random
    )
    times, stds, kelvin = [], [], []
    for step in range(steps):
        temperature = 200 + 100 * (step // 75)
        dynamics.set_temperature(temperature_K=temperature)
        dynamics.run(1)
        times.append(0.5 * (step + 1))
        stds.append(float(atoms.calc.results["forces_uncertainty"].max()))
        kelvin.append(temperature)
        if stds[-1] > limit:
            break

    figure = new_figure(*SIZE)
    axes = figure.subplots()
    axes.plot(times, stds, color=COLOURS[0], linewidth=1.0)
    axes.plot(times[-1], stds[-1], "X", color=COLOURS[1], markersize=8, zorder=4)
    axes.axhline(limit, color=COLOURS[1], linestyle="--", linewidth=1.0)
    axes.text(0.0, limit * 1.15, "the guard stops the run", color=COLOURS[1], fontsize=TEXT_SIZE)
    axes.set_yscale("log")
    axes.set_ylim(top=limit * 3)
    dress(axes, "time (fs), heated by 100 K each 37.5 fs", "largest std of a force (eV/Å)")
    print(f"stopped at {times[-1]} fs, {kelvin[-1]} K, {stds[-1]:.2f} eV/Å")
    return figure


PICTURES: dict[str, Callable[[BayesianPotential], Figure]] = {
    "stretch": stretch,
    "strain": strain,
    "stop": stop,
}


def main() -> None:
    """Draw all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pictures", nargs="*", help=", ".join(PICTURES))
    parser.add_argument("--model", type=Path, default=Path("runs/demo/ammonia.safetensors"))
    parser.add_argument("--output", type=Path, default=ASSETS)
    options = parser.parse_args()
    potential = blips.load(options.model)
    if not isinstance(potential, BayesianPotential):
        raise SystemExit(f"{options.model} is no Bayesian potential; make it with: make demo")
    for name in options.pictures or PICTURES:
        save_small(PICTURES[name](potential), options.output / f"{name}.png")


if __name__ == "__main__":
    main()
