"""Active learning of ammonia with GFN2-xTB: does the uncertainty find better labels than chance?

A pool of geometries from GFN2-xTB trajectories at 300, 1000 and 2000 K, a third each, and a test
set from other trajectories at the same temperatures. Every campaign begins with the same 20 random
labels of its seed and adds batches of 10 from the pool until the budget is spent, each time
training a Bayesian PaiNN from scratch:

| strategy | a batch |
|---|---|
| guided | largest force sigma, spread over structures' features |
| information | largest joint information of frozen members' forces |
| random | random geometries of the pool |

The figure that counts: with how many labels does a guided campaign reach the force MAE that the
random campaign of the same seed has at its end, and which fraction of the random labels is that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ase.io
import numpy as np
from ase import Atoms, units
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.md.langevin import Langevin
from rich.console import Console

from blips.active.campaign import run_campaign
from blips.active.config import load_campaign
from blips.active.summary import labels_to_reach
from blips.sim.reference import make_calculator
from studies.spec import BLIP_TRAINING, Findings, Layout, Run, RunSpec
from studies.tables import Column, Row, Table

STUDY = "active"
TEMPERATURES = (300.0, 1000.0, 2000.0)
LONGEST_BOND = 2.2  # A; a molecule that falls apart starts anew
SELECT = {
    "guided": {"score": "force_std_max", "diversity": True},
    "random": {"score": "random"},
    "information": {"score": "information"},
}
TRAINING = {
    "batch_size": 8,
    "loss": "mae",
    "loss_unit": "kcal/mol",
    "kl_weight": 0.3,
    "lr": 3e-3,
    "schedule": {"kind": "cosine", "warmup": 0.02},
    "checkpoint_every": 10,
    "threads": 1,
    "tensorboard": False,
}


# All labels in one batch, so that every model of a campaign is trained for the same number of
# steps, however many labels it has, and for more of them. With batches of 8 and 60 epochs, models
# with few labels get few steps, and errors fall because of more steps rather than better labels.
CONVERGED = {"batch_size": 64, "lr": 8e-3, "clip_norm": 10.0, "checkpoint_every": 100}


@dataclass(frozen=True)
class Profile:
    """How large the study is."""

    pool: int  # geometries at each temperature
    test: int  # likewise
    budget: int
    initial: int
    batch: int
    epochs: int
    features: int
    seeds: int
    strategies: tuple[str, ...]
    training: Mapping[str, Any] = field(default_factory=dict)  # beside the epochs


PROFILES: dict[str, Profile] = {
    "quick": Profile(12, 4, 10, 6, 4, 3, 8, 1, ("guided", "random")),
    "default": Profile(300, 60, 70, 20, 10, 60, 32, 5, ("guided", "random", "information")),
    "converged": Profile(300, 60, 70, 20, 10, 400, 32, 5, ("guided", "random"), CONVERGED),
}


def specs(profile: str) -> list[RunSpec]:
    """The pool, then the campaigns: guided and random seed by seed, the others afterwards."""
    size = PROFILES[profile]
    pool = {"pool": size.pool, "test": size.test, "temperatures": list(TEMPERATURES)}
    found = [RunSpec(STUDY, "pool", pool, 0)]
    for group in (size.strategies[:2], size.strategies[2:]):
        for seed in range(size.seeds):
            for name in group:
                settings = {**pool, "campaign": _campaign(size, name)}
                found.append(RunSpec(STUDY, name, settings, seed, ("pool-seed0",)))
    return found


def _campaign(size: Profile, name: str) -> dict[str, Any]:
    """Configuration of a campaign but for files and seed."""
    return {
        "model": {
            "hyperparameters": {
                "cutoff": 5.0,
                "features": size.features,
                "blocks": 2,
                "num_basis": 12,
            }
        },
        "training": {**TRAINING, "epochs": size.epochs, **size.training},
        "initial": {"count": size.initial, "displacement": 0.0},
        "explore": {"kind": "pool"},
        "select": {**SELECT[name], "batch": size.batch, "samples": 16, "chunk": 64},
        "stop": {"rounds": 1000, "labels": size.budget},
        "executor": {"kind": "inline"},
    }


def prepare(profile: str, console: Console) -> None:
    """Nothing has to be made before the runs."""


def execute(run: Run) -> Findings:
    """Make the pool, or run one campaign on it."""
    if run.spec.name == "pool":
        return _make_pool(run)
    data = run.needs["pool-seed0"]
    config = load_campaign(
        run.spec.settings["campaign"],
        {
            "seed": run.spec.seed,
            "training": BLIP_TRAINING,
            "select": {"method": "frozen"},
            "folder": str(run.folder / "campaign"),
            "initial": {"structures": str(data / "pool.extxyz")},
            "explore": {"pool": str(data / "pool.extxyz")},
            "evaluate": {"structures": str(data / "test.extxyz")},
        },
    )
    summary = run_campaign(config)
    metrics = {}
    for point in summary["curve"]:
        for name in ("force_mae", "energy_mae", "force_rank_correlation"):
            metrics[f"{name}_{point['labels']}"] = _metric(point[name])
    metrics["labels"] = _metric(summary["labels"])
    picks = [
        {"round": p["round"], "score": p["score"], "frame": p["reason"]["origin"]["frame"]}
        for p in summary["picks"]
    ]
    return Findings(metrics, {"curve": summary["curve"], "picks": picks})


def _metric(value: float | None) -> dict[str, float | None]:
    return {"value": float("nan") if value is None else float(value), "low": None, "high": None}


def _make_pool(run: Run) -> Findings:
    counts = {}
    for name, stream in (("pool", 0), ("test", 1)):
        frames: list[Atoms] = []
        for temperature in TEMPERATURES:
            frames += trajectory(temperature, run.spec.settings[name], stream)
        ase.io.write(run.folder / f"{name}.extxyz", frames)
        counts[name] = _metric(len(frames))
    return Findings(counts, {})


def trajectory(temperature: float, count: int, stream: int) -> list[Atoms]:
    """Labelled geometries, 5 fs apart, of Langevin dynamics with GFN2-xTB."""
    rng = np.random.default_rng([stream, int(temperature)])
    atoms = molecule("NH3")
    atoms.calc = make_calculator("gfn2-xtb", {})
    start = atoms.positions.copy()
    width = np.sqrt(atoms.get_masses() * units.kB * temperature)
    atoms.set_momenta(width[:, None] * rng.standard_normal((4, 3)))
    dynamics = Langevin(
        atoms,
        0.5 * units.fs,
        temperature_K=temperature,
        friction=0.02 / units.fs,
        fixcm=False,
        rng=rng,
    )
    dynamics.run(200)
    frames: list[Atoms] = []
    while len(frames) < count:
        dynamics.run(10)
        if atoms.get_distances(0, [1, 2, 3]).max() > LONGEST_BOND:
            atoms.positions[:] = start
            continue
        frame = Atoms(atoms.numbers, atoms.positions, info={"temperature": temperature})
        energy, forces = atoms.get_potential_energy(), atoms.get_forces()
        frame.calc = SinglePointCalculator(frame, energy=energy, forces=forces)
        frames.append(frame)
    return frames


NOTE = """\
Force MAE (eV/A, components) on the test set after so many labels, the first ones the same for all
strategies of a seed; mean ± standard deviation over seeds. "labels" is how many a campaign needs,
interpolated, for the force MAE that the random one of its seed has at its end; "fraction" is that
number over the random campaign's. A campaign that never reaches it counts with all its labels."""


def table(specs: Sequence[RunSpec], layout: Layout) -> Table:
    """Strategies by force MAE along the campaign, of the results that there are."""
    campaigns = [spec for spec in specs if spec.name != "pool"]
    size = campaigns[0].settings["campaign"]
    steps = range(size["initial"]["count"], size["stop"]["labels"] + 1, size["select"]["batch"])
    results = {spec.id: layout.read(spec) for spec in campaigns}
    rows = []
    for name in dict.fromkeys(spec.name for spec in campaigns):
        found = []
        for spec in campaigns:
            result = results[spec.id]
            if spec.name == name and result is not None:
                random = results.get(f"random-seed{spec.seed}")
                found.append({"metrics": {**result["metrics"], **_reached(result, random)}})
        rows.append(Row((name,), found))
    columns = [Column(str(labels), f"force_mae_{labels}", digits=4) for labels in steps]
    columns += [Column("labels", "reached", digits=1), Column("fraction", "fraction", digits=2)]
    title = "Active learning of NH3 (GFN2-xTB): force MAE by number of labels"
    return Table(("strategy",), columns, rows, title, NOTE)


def _reached(
    result: Mapping[str, Any], random: Mapping[str, Any] | None
) -> dict[str, dict[str, float | None]]:
    if random is None:
        return {}
    target, total = random["details"]["curve"][-1]["force_mae"], random["metrics"]["labels"]
    labels = labels_to_reach(result["details"]["curve"], target)
    return {"reached": _metric(labels), "fraction": _metric(labels / total["value"])}
