"""Draw the pictures of the documentation: docs/assets/{name}.png.

| picture | what it shows |
|---|---|
| stretch | an N-H bond of ammonia pulled: the demo's potential, its 90 % interval, DFT |
| strain | rock salt stretched and compressed: CHGNet as released and its 90 % interval |
| stop | molecular dynamics of ammonia that is heated until the force's std passes the guard |
| calibrate | reliability of the demo's BLIP far from its data, before and after calibration |
| batched | largest force std of four molecules in one batch, each at its own temperature |
| lammps | rock salt heated in LAMMPS with CHGNet: temperature and largest force std |
| properties | the equation of state of MgO by CHGNet and the members of its posterior |
| own_model | the stretched bond again, with the 30-line model of docs/add-your-own-model.md |
| active | learning curves of the study of active learning (results/active) |
| finetune | force errors and coverage of fine-tuned MatterSim (results/silica) |

Needs the model of the demo (`make demo`) and the extras [dft], [chgnet], [torchsim] and [lammps];
about five minutes.

    python -m recipes.gallery --model runs/demo/ammonia.safetensors
"""

import argparse
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.build import bulk
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import thermalize_momenta
from matplotlib.figure import Figure

import blips
from blips import properties
from blips.data.ammonia import load_ammonia
from blips.potential import BayesianPotential
from blips.sim.frames import FrameSaver
from blips.sim.guard import Guard
from blips.sim.lammps import Coupling, start
from blips.sim.pyscf import PySCF
from blips.sim.torchsim import TorchSimModel, integrate
from blips.train.released import load_released
from blips.uq.figures import COLOURS, DASHES, DPI, GUIDE, TEXT_SIZE, dress, new_figure
from blips.uq.plots import reliability
from recipes.reliability_figure import save_small

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs/assets"
WIDTH_OF_90 = 1.645  # half of the central 90 % interval of a Gaussian, in std
SIZE = (5.0, 3.4)  # inches


def stretch(potential: BayesianPotential, name: str = "PaiNN") -> Figure:
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
    axes.plot(lengths, mean, color=COLOURS[0], label=name)
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
    potential = load_released("chgnet")
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
    thermalize_momenta(atoms, 200, rng=random)
    friction = 0.05 / units.fs
    dynamics = Langevin(
        atoms, 0.5 * units.fs, temperature_K=200, friction=friction, fixcm=False, rng=random
    )
    times, stds, kelvin = [], [], []
    for step in range(0, steps, 2):
        temperature = 200 + 100 * (step // 75)
        dynamics.set_temperature(temperature_K=temperature)
        dynamics.run(2)
        times.append(0.5 * (step + 2))
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


def calibrate(potential: BayesianPotential) -> Figure:
    """Calibrate BLIP on half of the far structures; reliability on the others."""
    far = load_ammonia("test_ood")
    held_out, test = far[::2], far[1::2]
    blips.calibrate(potential, held_out, method="mc", samples=32)
    forces = np.concatenate([atoms.get_forces() for atoms in test])
    curves = {}
    for name, calibrated in (("before", False), ("after", True)):
        prediction = potential.predict(test, method="mc", samples=32, calibrated=calibrated)
        curves[name] = (prediction.forces, prediction.forces_total_std, forces)
    return reliability(curves).figure()


class _Recorder(FrameSaver):
    """Keep the largest force std of every walker at every look of a guard."""

    def __init__(self) -> None:
        super().__init__(distinct=0.0)
        self.stds: dict[int, list[tuple[int, float]]] = {}

    def offer(self, atoms: Atoms, step: int, *rest: Any, walker: int = 0, **options: Any) -> bool:
        largest = float(atoms.arrays["forces_uncertainty"].max())
        self.stds.setdefault(walker, []).append((step, largest))
        return super().offer(atoms, step, *rest, walker=walker, **options)


def batched(potential: BayesianPotential, limit: float = 1.0) -> Figure:
    """Run four molecules in one batch, each at its own temperature, until the guard halts it."""
    temperatures, recorder = [300, 1000, 1500, 2500], _Recorder()
    integrate(
        load_ammonia("valid")[:4],
        TorchSimModel(potential),
        Guard(low=1e-9, high=limit),  # every look is recorded
        saver=recorder,
        temperature=temperatures,
        steps=300,
        every=6,
    )
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    axes.axhline(limit, color=GUIDE, linestyle="--", linewidth=1.0)
    for walker, looks in sorted(recorder.stds.items()):
        steps, stds = np.array(looks).T
        colour = COLOURS[walker]
        axes.plot(steps, stds, color=colour, linewidth=1.2, label=f"{temperatures[walker]} K")
        if stds[-1] > limit:
            axes.plot(steps[-1], stds[-1], "X", color=colour, markersize=8, zorder=4)
    axes.set_yscale("log")
    dress(axes, "step", "largest std of a force (eV/Å)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False)
    return figure


def lammps(_: BayesianPotential) -> Figure:
    """Heat rock salt in LAMMPS: temperature, and the variable v_max_force_std."""
    atoms = bulk("NaCl", "rocksalt", a=5.69, cubic=True).repeat(2)
    lmp = start()
    times, stds, kelvin = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "nacl.data"
        atoms.write(data, format="lammps-data", masses=True, specorder=["Na", "Cl"])
        lines = ["units metal", "boundary p p p", f"read_data {data}", "pair_style none"]
        lmp.commands_list([*lines, "timestep 0.002", "velocity all create 600 1"])
    calculator = blips.Calculator(load_released("chgnet"), "map")
    with Coupling(lmp, calculator, ["Na", "Cl"], every=10):
        lmp.command("fix 1 all nvt temp 300 4000 0.05")
        for step in range(0, 500, 10):
            lmp.command(f"run 10 start 0 stop 500 pre {'no' if step else 'yes'} post no")
            times.append(0.002 * (step + 10))
            stds.append(lmp.extract_variable("max_force_std"))
            kelvin.append(lmp.get_thermo("temp"))
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    axes.plot(times, stds, color=COLOURS[0])
    dress(axes, "time (ps)", "v_max_force_std (eV/Å)")
    axes.yaxis.label.set_color(COLOURS[0])
    other = axes.twinx()
    other.plot(times, kelvin, color=COLOURS[1], linestyle=DASHES[1])
    other.set_ylabel("temperature (K)", color=COLOURS[1])
    other.tick_params(labelsize=TEXT_SIZE)
    return figure


def eos(_: BayesianPotential) -> Figure:
    """Plot energy against volume of MgO: CHGNet, and the members of its posterior."""
    found = properties.equation_of_state(load_released("chgnet"), bulk("MgO", "rocksalt", a=4.2))
    figure = found.plot()
    for axes in figure.axes[1:]:
        axes.remove()
    figure.set_size_inches(*SIZE)
    figure.set_dpi(DPI)
    curve = figure.axes[0]
    figure.set_layout_engine("constrained")
    curve.set_subplotspec(figure.add_gridspec(1, 1)[0])
    modulus = found["bulk_modulus"]
    curve.set_title(f"bulk modulus {modulus.value:.0f} ± {modulus.std:.0f} GPa", loc="left")
    return figure


def own_model(_: BayesianPotential) -> Figure:
    """Train the model of docs/add-your-own-model.md on ammonia, and pull a bond."""
    page = (ROOT / "docs/add-your-own-model.md").read_text()
    first = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(first, names)
    potential = names["potential"]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = {"training": {"epochs": 200, "lr": 3e-3, "tensorboard": False}}
        blips.fit(
            potential,
            load_ammonia("train"),
            valid=load_ammonia("valid"),
            config=config,
            folder=folder,
        )
    return stretch(potential, "MyModel")


def active(_: BayesianPotential) -> Figure:
    """Plot test force error against labels for NH3: means over seeds, bands of all of them."""
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    labels = [10, 20, 30, 40, 50]
    for number, rule in enumerate(("expected_reduction", "random")):
        curves = []
        for path in sorted(ROOT.glob(f"results/active/default/nh3-{rule}-seed*.json")):
            metrics = json.loads(path.read_text())["metrics"]
            curves.append([metrics[f"force_mae_{count}"]["value"] for count in labels])
        colour, seeds = COLOURS[number], np.array(curves)
        axes.fill_between(
            labels, seeds.min(axis=0), seeds.max(axis=0), color=colour, alpha=0.2, linewidth=0
        )
        style = {"linestyle": DASHES[number], "marker": "o", "markersize": 4}
        axes.plot(labels, seeds.mean(axis=0), color=colour, label=rule, **style)
    axes.set_yscale("log")
    axes.set_yticks([0.06, 0.1, 0.2, 0.4], ["0.06", "0.1", "0.2", "0.4"])
    axes.minorticks_off()
    dress(axes, "labelled structures of NH3", "force MAE on test structures (eV/Å)")
    axes.legend(fontsize=TEXT_SIZE, frameon=False)
    return figure


def finetune(_: BayesianPotential) -> Figure:
    """Plot force errors and coverage on silica, as released and fine-tuned."""

    def mean(method: str, name: str) -> float:
        files = ROOT.glob(f"results/silica/default/{method}-seed*.json")
        found = [json.loads(path.read_text())["metrics"][name]["value"] for path in files]
        return float(np.mean(found))

    models = {"as released": "32-pretrained", "32": "32-plain", "128": "128-plain"}
    bars = {"32": "32-conditioned", "128": "128-conditioned"}
    figure = new_figure(6.4, 3.2)
    left, right = figure.subplots(1, 2)
    for axes, files, what, factor in (
        (left, models, "forces_mae", 1000.0),
        (right, bars, "forces_coverage_90", 100.0),
    ):
        for number, where in enumerate(("known", "new")):
            values = [factor * mean(file, f"{where}_{what}") for file in files.values()]
            places = np.arange(len(files)) + 0.4 * number - 0.2
            axes.bar(places, values, 0.38, color=COLOURS[number], label=f"{where} frameworks")
        axes.set_xticks(range(len(files)), list(files))
    right.axhline(90, color=GUIDE, linestyle="--", linewidth=1.0)
    dress(left, "structures to fine-tune on", "force MAE (meV/Å)")
    dress(right, "structures to fine-tune on", "forces within 90 % interval (%)")
    left.set_ylim(top=48)
    left.legend(loc="upper right", fontsize=TEXT_SIZE, frameon=False)
    return figure


PICTURES: dict[str, Callable[[BayesianPotential], Figure]] = {
    "stretch": stretch,
    "strain": strain,
    "stop": stop,
    "calibrate": calibrate,
    "batched": batched,
    "lammps": lammps,
    "properties": eos,
    "own_model": own_model,
    "active": active,
    "finetune": finetune,
}


def main() -> None:
    """Draw all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pictures", nargs="*", help=", ".join(PICTURES))
    parser.add_argument("--model", type=Path, default=Path("runs/demo/ammonia.safetensors"))
    parser.add_argument("--output", type=Path, default=ASSETS)
    options = parser.parse_args()
    for name in options.pictures or PICTURES:
        blip = options.model.parent / "blip/best.safetensors"
        potential = blips.load(blip if name == "calibrate" else options.model)
        if not isinstance(potential, BayesianPotential):
            raise SystemExit(f"{options.model} is no Bayesian potential; make it with: make demo")
        save_small(PICTURES[name](potential), options.output / f"{name}.png")


if __name__ == "__main__":
    main()
