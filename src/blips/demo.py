"""The demo: error bars for ammonia near the data and far from it, and for a released model.

64 of the 78 shipped near-equilibrium geometries train a PaiNN, whose readout is then conditioned on
them; 14 validation geometries choose the checkpoint and set the scale of the error bars. Beside it,
the paper's BLIP, trained with noise on the weights, calibrated on the same 14. Both are tested on
the other 14 (near) and on 129 distorted geometries up to 70 kcal/mol above the minimum (far).
"""

import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ase.io
import torch
from ase.build import bulk
from rich import box
from rich.console import Console
from rich.table import Table

from blips.backbones import PaiNN
from blips.conversion import bayesianize
from blips.data.ammonia import load_ammonia
from blips.errors import MissingPackageError
from blips.files import write_json
from blips.potential import BayesianPotential
from blips.prediction import Prediction
from blips.report import write_report
from blips.train.checkpoint import save
from blips.train.fit import fit
from blips.train.released import load_released
from blips.uq.assess import References, assess, calibrate, verdict, write_figures

NUM_TRAIN = 64
BLIP_SAMPLES = 64
TRAINING: dict[str, Any] = {"epochs": 200, "threads": 1, "tensorboard": False}
BLIP_TRAINING: dict[str, Any] = {
    **TRAINING,
    "epochs": 250,
    "batch_size": 32,
    "loss_unit": "kcal/mol",
    "noise": True,
    "kl_weight": 3.0,
    "lr": 2e-3,
    "schedule": {"kind": "cosine", "warmup": 0.02},
    "condition": False,
}
CONDITIONED, BLIP, PLAIN = "conditioned", "paper's BLIP", "plain"
COLUMNS = {  # of the table -> level and metric
    "energy MAE (eV)": ("energy", "mae"),
    "force MAE (eV/Å)": ("forces", "mae"),
    "within 90 %": ("forces", "coverage_90"),
    "force ECE": ("forces", "ece"),
    "rank corr.": ("forces_per_structure", "spearman"),
}


def run_demo(folder: str | Path, *, epochs: int | None = None, seed: int = 0) -> None:
    """Train, condition, evaluate, report, in `folder`."""
    folder, console = Path(folder), Console()
    start = time.perf_counter()
    structures = load_ammonia("train")
    train, near = structures[:NUM_TRAIN], structures[NUM_TRAIN:]
    valid, far = load_ammonia("valid"), load_ammonia("test_ood")
    torch.manual_seed(seed)
    plain = PaiNN(features=64)
    trained: list[BayesianPotential] = []
    for name, training in ((CONDITIONED, TRAINING), ("blip", BLIP_TRAINING)):
        console.print(f"training PaiNN, {'plain, then ' if name == CONDITIONED else ''}{name}")
        for state in ("last", "best"):  # of an earlier demo
            (folder / name / f"{state}.safetensors").unlink(missing_ok=True)
        trained.append(bayesianize(copy.deepcopy(plain), prior_dropout=0.5, seed=seed))
        config = {"training": training if epochs is None else {**training, "epochs": epochs}}
        options = {"config": {**config, "seed": seed}, "folder": folder / name}
        fit(trained[-1], train, valid=valid, **options)
    potential, blip = trained
    calibrate(blip, valid, samples=BLIP_SAMPLES, seed=seed)
    path = save(potential, folder / "ammonia.safetensors")
    models: dict[str, Callable[..., Prediction]] = {
        CONDITIONED: potential.predict,
        BLIP: partial(blip.predict, method="mc", samples=BLIP_SAMPLES),
        PLAIN: partial(potential.predict, method="map"),
    }
    files: list[Path] = []
    table = Table("NH3", *COLUMNS, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.columns[0].no_wrap = True
    for short, frames in (("near", near), ("far", far)):
        references = References.of(frames)
        predictions = {name: predict(frames, seed=seed) for name, predict in models.items()}
        evaluations = {name: assess(p, references) for name, p in predictions.items()}
        write_figures(folder / "figures" / short, predictions, references)
        metrics = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
        write_json(folder / f"metrics_{short}.json", metrics)
        files.append(folder / f"test_{short}.extxyz")
        ase.io.write(files[-1], frames, format="extxyz")
        for name, one in evaluations.items():
            found = [getattr(one, level).get(metric) for level, metric in COLUMNS.values()]
            cells = ("-" if value is None else f"{value.value:.3g}" for value in found)
            table.add_row(f"{short}, {name}", *cells)
    console.print(table)
    far_away = evaluations[CONDITIONED]  # of the last set
    console.print(f"Far, {CONDITIONED}: {verdict(far_away)}", highlight=False)
    _released_model(console)
    report = write_report(folder / CONDITIONED, folder / "report.html", structures=files, seed=seed)
    console.print(f"{time.perf_counter() - start:.0f} s; model {path}")
    console.print(f"figures  {folder / 'figures'}\nreport   {report}")


def _released_model(console: Console) -> None:
    """Evaluate the released CHGNet with its shipped error bars on two crystals."""
    known = bulk("NaCl", "rocksalt", a=5.69, cubic=True)
    strange = known.copy()
    strange.set_cell(1.3 * known.cell.array, scale_atoms=True)
    strange.rattle(0.3, seed=0)
    try:
        prediction = load_released("chgnet").predict([known, strange])
    except MissingPackageError as error:
        console.print(f"CHGNet is not installed: {error}")
        return
    console.print("CHGNet as released, energy and largest std of a force:")
    for k, name in enumerate(("rock salt", "stretched by 30 %, rattled by 0.3 Å")):
        one = prediction[k]
        energy, std = (one.array(n)[0] / len(known) for n in ("energy", "energy_total_std"))
        force = one.array("forces_total_std").max()
        console.print(f"  {name}: {energy:.3f} ± {std:.3f} eV/atom, {force:.3f} eV/Å")
