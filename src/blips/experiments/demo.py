"""The demo: a Bayesian PaiNN for ammonia, calibrated and tested in and out of distribution.

64 of the 78 shipped near-equilibrium geometries train two models of the same architecture, one
plain and one Bayesian. 14 validation geometries choose the checkpoints and calibrate the error
bars. Both are tested on the other 14 (in distribution) and on 129 distorted geometries up to
70 kcal/mol above the minimum (out of distribution).
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ase.io
import torch
from ase import Atoms
from rich.console import Console
from rich.table import Table

from blips.backbones import PaiNN
from blips.baselines import predict_plain
from blips.data.ammonia import load_ammonia
from blips.factory import bayesianize
from blips.potential import BayesianPotential
from blips.predict import Prediction
from blips.report.sources import write_manifest
from blips.train.checkpoint import save
from blips.train.fit import fit
from blips.uq.evaluation import Evaluation
from blips.uq.report import References, assess, recalibrate, write_evaluation, write_figures

NUM_TRAIN = 64
SAMPLES = 64
BACKBONE = {"cutoff": 5.0, "features": 64, "blocks": 3, "num_basis": 16}
TRAINING: dict[str, Any] = {
    "epochs": 250,
    "batch_size": 32,
    "loss": "mae",
    "loss_unit": "kcal/mol",
    "weights": {"energy": 0.1, "forces": 1.0},
    "kl_weight": 3.0,
    "lr": 2e-3,
    "schedule": {"kind": "cosine", "warmup": 0.02},
    "threads": 1,
    "tensorboard": False,
}


@dataclass(frozen=True)
class DemoResult:
    """Where the demo left its files, and what it measured."""

    folder: Path
    evaluations: dict[str, dict[str, Evaluation]]  # set -> model -> metrics


def run_demo(folder: str | Path, *, epochs: int | None = None, seed: int = 0) -> DemoResult:
    """Train, calibrate, evaluate, draw; everything ends up in `folder`."""
    folder, console = Path(folder), Console()
    training = TRAINING | ({} if epochs is None else {"epochs": epochs})
    structures = load_ammonia("train")
    train, test = structures[:NUM_TRAIN], structures[NUM_TRAIN:]
    valid, far = load_ammonia("valid"), load_ammonia("test_ood")
    torch.manual_seed(seed)
    plain = PaiNN(**BACKBONE)
    potential = bayesianize(copy.deepcopy(plain), prior_dropout=0.5, seed=seed)
    for name, model in (("plain", plain), ("blip", potential)):
        console.print(f"training the {'Bayesian' if name == 'blip' else 'plain'} PaiNN")
        fit(
            model,
            train,
            valid=valid,
            config={"training": training, "seed": seed},
            folder=_fresh(folder / name),
        )
    recalibrate(potential, valid, samples=SAMPLES, seed=seed)
    path = save(potential, folder / "blip.safetensors")
    evaluations: dict[str, dict[str, Evaluation]] = {}
    files: dict[str, str] = {}
    for label, test_set in (("in distribution", test), ("out of distribution", far)):
        evaluations[label] = _evaluate(folder, label, test_set, plain, potential, seed)
        files[label] = f"test_{label.replace(' ', '_')}.extxyz"
        ase.io.write(folder / files[label], test_set, format="extxyz")
    write_manifest(folder, "A Bayesian potential for ammonia", path.name, "blip", files)
    console.print(_table(evaluations))
    summary = folder / "summary.md"
    summary.write_text(_summary(evaluations))
    console.print(f"model    {path}\nfigures  {folder / 'figures'}\nsummary  {summary}")
    console.print(f"report   blips report {folder} -o report.html")
    return DemoResult(folder, evaluations)


def _fresh(folder: Path) -> Path:
    """Remove what an earlier demo left of its run, and nothing else."""
    for name in ("last.safetensors", "best.safetensors", "config.yaml", "metrics.csv"):
        (folder / name).unlink(missing_ok=True)
    return folder


def _evaluate(
    folder: Path,
    label: str,
    structures: list[Atoms],
    plain: PaiNN,
    potential: BayesianPotential,
    seed: int,
) -> dict[str, Evaluation]:
    references = References.of(structures)
    predictions: dict[str, Prediction] = {
        "BLIP": potential.predict(structures, samples=SAMPLES, seed=seed),
        "BLIP, uncalibrated": potential.predict(
            structures, samples=SAMPLES, seed=seed, calibrated=False
        ),
        "plain": predict_plain(plain, structures),
    }
    name = label.replace(" ", "_")
    write_figures(folder / "figures" / name, predictions, references)
    evaluations = {model: assess(p, references) for model, p in predictions.items()}
    write_evaluation(folder / f"metrics_{name}.json", evaluations)
    return evaluations


COLUMNS = (
    ("energy MAE [eV]", "energy", "mae"),
    ("force MAE [eV/Å]", "forces", "mae"),
    ("force ECE", "forces", "ece"),
    ("force NLL", "forces", "nll"),
    ("coverage 90 %", "forces", "coverage_90"),
    ("Spearman", "forces_per_structure", "spearman"),
)


def _cells(evaluation: Evaluation, *, intervals: bool) -> list[str]:
    cells = []
    for _, level, metric in COLUMNS:
        interval = getattr(evaluation, level).get(metric)
        if interval is None:
            cells.append("-")
        else:
            cells.append(str(interval) if intervals else f"{interval.value:.3g}")
    return cells


def _table(evaluations: dict[str, dict[str, Evaluation]]) -> Table:
    table = Table(title="NH3 (intervals in summary.md)")
    for header in ("", *(column[0] for column in COLUMNS)):
        table.add_column(header)
    for label, by_model in evaluations.items():
        table.add_row(f"[bold]{label}")
        for model, evaluation in by_model.items():
            table.add_row(f" {model}", *_cells(evaluation, intervals=False))
    return table


def _summary(evaluations: dict[str, dict[str, Evaluation]]) -> str:
    lines = ["# A Bayesian potential for ammonia", "", (__doc__ or "").split("\n\n", 1)[1].strip()]
    headers = ["model", *(column[0] for column in COLUMNS)]
    for label, by_model in evaluations.items():
        lines += ["", f"## {label.capitalize()}", "", "| " + " | ".join(headers) + " |"]
        lines.append("|" + "---|" * len(headers))
        for model, evaluation in by_model.items():
            lines.append("| " + " | ".join([model, *_cells(evaluation, intervals=True)]) + " |")
        name = label.replace(" ", "_")
        lines += ["", f"![reliability](figures/{name}/reliability.png)"]
        lines.append(f"![sigma against error](figures/{name}/sigma_error.png)")
        lines.append(f"![rejection](figures/{name}/rejection.png)")
    lines += [
        "",
        _conclusion(*(by_model["BLIP"] for by_model in evaluations.values())),
        "",
        "Intervals: 95 %, bootstrap over structures. Error bars of BLIP are calibrated on",
        "the validation geometries; metrics are defined in `blips.uq`.",
    ]
    return "\n".join(lines) + "\n"


def _conclusion(near: Evaluation, far: Evaluation) -> str:
    """How errors and error bars grow from one test set to the other."""
    errors = far.forces["rmse"].value / near.forces["rmse"].value
    bars = far.forces["rms_std"].value / near.forces["rms_std"].value
    verdict = "too certain there" if bars < 0.5 * errors else "aware of it"
    return (
        f"From the first set to the second the force errors of BLIP grow {errors:.0f}-fold, "
        f"its error bars {bars:.1f}-fold: the model is {verdict}. The Spearman coefficient says "
        "how well the error bars rank the structures by their error."
    )
