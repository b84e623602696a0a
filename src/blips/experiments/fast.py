"""Study: how close error bars without sampling come to those of a thousand samples.

For each model, structures near what it knows and displaced ones far from it. Reference: standard
deviations of `samples` posterior samples. Compared with it, by Spearman's coefficient and the
median ratio of sigma:

* ``onepass``: `predict(method="onepass")`, after `distil_forces` on other structures;
* ``propagate``: variances passed forward (direct models only);
* ``mc4``, ``mc8``, ``mc32``: so few samples, with other seeds;
* ``probes3``: derivatives of the forces by the noise along three random directions, that is three
  samples of the model made linear in its noise. Each costs what a sample costs.

Every model leaves one JSON file, which a second run does not make again.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.build import molecule
from ase.spacegroup import crystal
from scipy.stats import spearmanr

from blips.backbones import PaiNN, load
from blips.data.ammonia import load_ammonia
from blips.data.structures import read_structures
from blips.errors import BlipsError
from blips.experiments.demo import BACKBONE, NUM_TRAIN, TRAINING
from blips.factory import bayesianize
from blips.potential import BayesianPotential
from blips.predict import Array, Prediction
from blips.train.fit import fit
from blips.train.run import environment

LINEAR = 1e-2  # size of the noise that the model is linear in, over its real size
FEW = (4, 8, 32)
SILICA = Path("silica") / "test_same_topologies_300.extxyz"


@dataclass(frozen=True)
class Sets:
    """Structures to learn one-pass forces from, and to compare on."""

    lessons: list[Atoms]
    near: list[Atoms]
    far: list[Atoms]


@dataclass(frozen=True)
class Subject:
    """A model of the study."""

    make: Callable[[Path], BayesianPotential]
    sets: Callable[[int], Sets]


def quartz(std: float, seed: int) -> Atoms:
    """Alpha quartz, 9 atoms, every coordinate displaced by N(0, std^2)."""
    cell = crystal(
        ["Si", "O"],
        [(0.4697, 0, 1 / 3), (0.4133, 0.2672, 0.2144)],
        spacegroup=152,
        cellpar=[4.9137, 4.9137, 5.4047, 90, 90, 120],
    )
    return displaced(Atoms(cell.numbers, cell.positions, cell=cell.cell, pbc=True), std, seed)


def displaced(atoms: Atoms, std: float, seed: int) -> Atoms:
    """A copy with every coordinate displaced by N(0, std^2), A."""
    moved = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
    moved.positions += np.random.default_rng(seed).normal(scale=std, size=moved.positions.shape)
    return moved


def ammonia_sets(count: int) -> Sets:
    """Shipped NH3: lessons among the trained geometries, near the others, far distorted ones."""
    known, far = load_ammonia("train"), load_ammonia("test_ood")
    return Sets(known[: 5 * count], known[NUM_TRAIN:], far[:: max(1, len(far) // (8 * count))])


def mixed_sets(count: int) -> Sets:
    """Quartz, NH3 and, where the data are there, the smallest amorphous silica cells."""
    amorphous: list[Atoms] = []
    folder = os.environ.get("BLIPS_DATA")
    if count > 2 and folder and (Path(folder) / SILICA).exists():
        cells = sorted(read_structures(Path(folder) / SILICA), key=len)
        amorphous = [displaced(atoms, 0.0, 0) for atoms in cells[:2]]
    ammonia = molecule("NH3")

    def some(std: float, first: int) -> list[Atoms]:
        pairs = [(quartz(std, k), displaced(ammonia, std, k)) for k in range(first, first + count)]
        return [atoms for pair in pairs for atoms in pair]

    return Sets(
        some(0.05, 0) + amorphous[:1],
        some(0.05, 100) + amorphous[1:],
        some(0.25, 200) + [displaced(atoms, 0.25, 300) for atoms in amorphous[1:]],
    )


def trained_painn(folder: Path) -> BayesianPotential:
    """PaiNN of the demo, trained shortly on the shipped NH3."""
    torch.manual_seed(0)
    potential = bayesianize(PaiNN(**BACKBONE), prior_dropout=0.5, seed=0)
    training = {**TRAINING, "epochs": 100}
    fit(
        potential,
        load_ammonia("train")[:NUM_TRAIN],
        valid=load_ammonia("valid"),
        config={"training": training, "seed": 0},
        folder=folder / "painn",
        resume=True,
    )
    return potential


def released(name: str, **options: Any) -> Callable[[Path], BayesianPotential]:
    """A released model with the posterior that `bayesianize` begins with."""

    def make(_folder: Path) -> BayesianPotential:
        torch.manual_seed(0)
        return bayesianize(load(name, **options))

    return make


SUBJECTS: dict[str, Subject] = {
    "painn-nh3": Subject(trained_painn, ammonia_sets),
    "chgnet": Subject(released("chgnet"), mixed_sets),
    "sevennet-0": Subject(released("sevennet-0", trust=True), mixed_sets),
    "mattersim-1m": Subject(released("mattersim-1m"), mixed_sets),
    "orb-v3-direct-20-omat (random)": Subject(
        released("orb-v3-direct-20-omat", random=True), mixed_sets
    ),
}


def study(
    folder: Path,
    *,
    samples: int = 1000,
    count: int = 4,
    only: Sequence[str] = (),
    runs: Path = Path("runs/fast"),
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure all models whose packages are there; JSON for each, and one table.

    Args:
        folder: for the results.
        samples: of the reference.
        count: of quartz cells and of molecules in each set; with 3 and more also amorphous silica.
        only: names of models; all if empty.
        runs: for the training of PaiNN.
        report: told of what is done and what is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for name, subject in SUBJECTS.items():
        path = folder / f"{name.split(' ')[0]}.json"
        if path.exists():
            found[name] = json.loads(path.read_text())
            continue
        if only and name.split(" ")[0] not in only:
            continue
        try:
            result = measure(subject.make(runs), subject.sets(count), samples)
        except BlipsError as error:
            report(f"{name} is left out: {error}")
            continue
        found[name] = {
            "environment": environment(),
            "samples": samples,
            "sets": result,
        }
        path.write_text(json.dumps(found[name], indent=1) + "\n")
        report(f"{name} done")
    (folder / "table.md").write_text(table(found))
    return found


def measure(potential: BayesianPotential, sets: Sets, samples: int) -> dict[str, Any]:
    """Comparison of every way on both sets."""
    spread = potential.distil_forces(sets.lessons, samples=64, seed=1)
    result: dict[str, Any] = {"distilled": dict(spread.quality)}
    for label, structures in (("near", sets.near), ("far", sets.far)):
        reference = _each(potential, structures, samples=samples, seed=2)
        ways = {"onepass": _each(potential, structures, method="onepass")}
        if not potential.backbone.conservative:
            ways["propagate"] = _each(potential, structures, method="propagate")
        for count in FEW:
            ways[f"mc{count}"] = _each(potential, structures, samples=count, seed=100 + count)
        with linear_in_noise(potential):
            ways["probes3"] = _each(potential, structures, samples=3, seed=200)
        result[label] = {
            "structures": len(structures),
            "atoms": int(reference.n_atoms.sum()),
            "sigma_forces_range": _range(reference.array("forces_std")),
            **{way: compare(found, reference) for way, found in ways.items()},
        }
        for name in ("energy_ratio", "forces_ratio"):
            del result[label]["probes3"][name]  # their noise is smaller on purpose
    return result


def _each(potential: BayesianPotential, structures: Sequence[Atoms], **options: Any) -> Prediction:
    """Without stress or calibration, each structure by itself, so that models may mix cells."""
    parts = [potential.predict(atoms, calibrated=False, **options) for atoms in structures]
    return Prediction.join(parts)


@contextmanager
def linear_in_noise(potential: BayesianPotential) -> Iterator[None]:
    """Coefficients so small that outputs are linear in the noise; ranks are those of real size."""
    own = potential.coefficients

    def tiny(graph: Any) -> dict[str, Any]:
        return {name: LINEAR**2 * value for name, value in own(graph).items()}

    potential.coefficients = tiny  # type: ignore[method-assign]
    try:
        yield
    finally:
        del potential.coefficients


def compare(found: Prediction, reference: Prediction) -> dict[str, float]:
    """Spearman's coefficients and median ratios of sigma."""
    result: dict[str, float] = {}
    for name in ("energy", "forces"):
        sigma, expected = getattr(found, f"{name}_std"), reference.array(f"{name}_std")
        if sigma is None:
            continue
        result[f"{name}_spearman"] = _rho(sigma.ravel(), expected.ravel())
        result[f"{name}_ratio"] = round(float(np.median(sigma / expected)), 3)
        if name == "forces":
            of_atoms = (np.sqrt(np.square(s).sum(axis=1)) for s in (sigma, expected))
            result["atoms_spearman"] = _rho(*of_atoms)
    return result


def _rho(a: Array, b: Array) -> float:
    return round(float(spearmanr(a, b).statistic), 3)  # type: ignore[attr-defined]


def _range(values: Array) -> list[float]:
    return [float(np.percentile(values, q)) for q in (5, 50, 95)]


COLUMNS = (
    "energy_spearman",
    "energy_ratio",
    "forces_spearman",
    "forces_ratio",
    "atoms_spearman",
)


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    head = ["model", "K", "set", "way", *(c.replace("_", " ") for c in COLUMNS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, content in found.items():
        for label in ("near", "far"):
            for way, row in content["sets"][label].items():
                if not isinstance(row, dict):
                    continue
                cells = [name, str(content["samples"]), label, way]
                cells += [str(row.get(column, "-")) for column in COLUMNS]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
