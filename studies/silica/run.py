"""One fine-tuning run: a released model, training or assembly, calibration, prediction, metrics.

Methods (`settings["method"]["kind"]`):

| kind | what it is |
|---|---|
| pretrained | the released model; only its energies per element are fitted to the training labels |
| plain | fine-tuned without posterior |
| blip | fine-tuned with posterior; metrics of the sample mean, and `..._map` of posterior means |
| frozen | a `blip` run as a committee of frozen draws (noise shared by all rows) |
| blip_afterwards | a `plain` run, whose weights stay; then a posterior around them |
| conditioned | a `plain` run; a posterior of its readout conditioned on the training structures |
| deep_ensemble | several `plain` runs together |

Error bars get one factor each for energies and forces, fitted on calibration structures, which also
give the conditioned posterior its scale. Metrics
are in eV and A, and named <test>_<level>_<metric>; `..._calibrated` are those with that factor.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms

from blips.backbones.base import AtomisticBackbone, Backbone
from blips.baselines import DeepEnsemble, predict_plain
from blips.config import ModelConfig, RunConfig
from blips.conversion import bayesianize
from blips.errors import ConfigError
from blips.potential import BayesianPotential
from blips.prediction import Prediction
from blips.train.fit import fit
from blips.train.references import set_reference_energies
from blips.train.released import build_model, load
from blips.uq.assess import STD_FLOOR, References, assess, calibrate
from studies.silica.data import Data, load_data
from studies.spec import BLIP_TRAINING, Findings, Run

Uncertain = BayesianPotential | DeepEnsemble
Metrics = dict[str, dict[str, float | None]]
LEVELS = {
    "energy": "energy",
    "atom_energy": "energy_per_atom",
    "forces": "forces",
    "atom": "forces_per_atom",
    "structure": "forces_per_structure",
}
UNCHANGED_BY_SCALE = ("mae", "mse", "rmse", "spearman", "auroc", "rejection_auc", "auc_normalised")
OF_MEANS = ("energy_mae", "atom_energy_mae", "forces_mae", "forces_rmse")
BATCH_SIZE = 8
ROWS = 12  # force rows of a structure that the posterior is conditioned on


def execute(run: Run) -> Findings:
    """Train (or continue, or assemble), calibrate, predict the test sets, measure."""
    torch.set_num_threads(1)
    settings = run.spec.settings
    data = load_data(settings["data"])
    model, details = finetuned(run, data)
    options = _options(model, settings, run.spec.seed)
    if not isinstance(model, Backbone) and settings["method"]["kind"] != "conditioned":
        fitted = calibrate(model, data.calibration, **options)
        details["calibration"] = {name: found.to_dict() for name, found in fitted.items()}
    metrics: Metrics = {}
    parts = {"valid": data.valid, **data.tests} if isinstance(model, Backbone) else data.tests
    for name, structures in parts.items():
        found = _measured(model, structures, options, settings["bootstrap"], run, name)
        metrics |= {f"{name}_{metric}": value for metric, value in found.items()}
    return Findings(metrics, details)


def finetuned(run: Run, data: Data) -> tuple[Backbone | Uncertain, dict[str, Any]]:
    """Fine-tune; return the model of the least validation loss and the training's history."""
    settings, seed = run.spec.settings, run.spec.seed
    kind = settings["method"]["kind"]
    if kind == "deep_ensemble":
        return DeepEnsemble([_plain(folder) for folder in run.needs.values()]), {
            "built_on": list(run.needs)
        }
    if kind == "frozen":
        return _bayesian(*run.needs.values()), {"built_on": list(run.needs)}
    if kind == "conditioned":
        model = _around(run)
        model.condition(data.train, valid=data.calibration, rows=ROWS, seed=seed)
        return model, {"built_on": list(run.needs), "posterior": str(model.posterior)}
    model = _around(run) if kind == "blip_afterwards" else _start(settings, seed)
    if isinstance(model, AtomisticBackbone) and kind == "pretrained":
        set_reference_energies(model, data.train, RunConfig())
        return model, {}
    result = fit(
        model,
        data.train[: settings["data"].get("afterwards")],
        valid=data.valid,
        config={"training": {**BLIP_TRAINING, **settings["training"]}, "seed": seed},
        folder=run.folder,
        resume=True,
    )
    progress = result.progress
    return model, {
        "epochs": progress.epoch,
        "best_epoch": progress.best_epoch,
        "best_valid_loss": progress.best_loss,
        "last_epoch": progress.history[-1],
    }


def _start(settings: Mapping[str, Any], seed: int) -> Backbone | BayesianPotential:
    """Load the released model, with a posterior for BLIP."""
    options = dict(settings["method"])
    kind = options.pop("kind")
    if kind not in ("pretrained", "plain", "blip"):
        raise ConfigError(f"unknown method {kind!r} of fine-tuning")
    bayes = {"enabled": kind == "blip", **options}
    return build_model(ModelConfig.model_validate({**settings["model"], "bayes": bayes}), seed)


def _around(run: Run) -> BayesianPotential:
    """Put a posterior around a fine-tuned model, as narrow as around released weights."""
    (folder,) = run.needs.values()
    backbone = _plain(folder)
    backbone.pretrained = True
    options = {key: value for key, value in run.spec.settings["method"].items() if key != "kind"}
    return bayesianize(backbone, seed=run.spec.seed, **options)


def _bayesian(folder: Path) -> BayesianPotential:
    model = load(folder / "best.safetensors")
    if not isinstance(model, BayesianPotential):
        raise ConfigError(f"{folder} holds a {type(model).__name__}; expected one with posterior")
    return model


def _plain(folder: Path) -> Backbone:
    model = load(folder / "best.safetensors")
    if not isinstance(model, Backbone):
        raise ConfigError(f"{folder} holds a {type(model).__name__}; expected a plain model")
    return model


def _options(model: Backbone | Uncertain, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    options: dict[str, Any] = {"batch_size": BATCH_SIZE}
    if isinstance(model, BayesianPotential):
        kind = settings["method"]["kind"]
        method = kind if kind in ("frozen", "conditioned") else "mc"
        options |= {"samples": settings["samples"], "seed": seed, "method": method}
    return options


def _measured(
    model: Backbone | Uncertain,
    structures: Sequence[Atoms],
    options: Mapping[str, Any],
    bootstrap: int,
    run: Run,
    name: str,
) -> Metrics:
    """Compute metrics on one set of structures; keep its predictions in the run's folder."""
    references = References.of(structures)
    if isinstance(model, Backbone):
        return measure(predict_plain(model, structures, **options), references, bootstrap)
    predicted = model.predict(structures, calibrated=False, **options)
    _keep(run, name, predicted, references)
    metrics = measure(predicted, references, bootstrap)
    calibrated = predicted.recalibrated(model.calibration)
    for metric, value in measure(calibrated, references, bootstrap).items():
        if not metric.endswith(UNCHANGED_BY_SCALE):
            metrics[f"{metric}_calibrated"] = value
    if isinstance(model, BayesianPotential):
        means = model.predict(structures, method="map", batch_size=BATCH_SIZE)
        of_means = measure(means, references, bootstrap)
        metrics |= {f"{metric}_map": of_means[metric] for metric in OF_MEANS}
    return metrics


def measure(prediction: Prediction, references: References, bootstrap: int) -> Metrics:
    """Compute metrics with bootstrap intervals over structures, as <level>_<metric>."""
    evaluation = assess(prediction, references, n_bootstrap=bootstrap)
    return {
        f"{short}_{name}": {"value": found.value, "low": found.low, "high": found.high}
        for short, level in LEVELS.items()
        for name, found in getattr(evaluation, level).items()
        if np.isfinite(found.value)
    }


def _keep(run: Run, name: str, predicted: Prediction, references: References) -> None:
    arrays = {
        "energy": predicted.energy,
        "energy_std": predicted.energy_total_std,
        "forces": predicted.forces,
        "forces_std": predicted.forces_total_std,
        "energy_ref": references.energy,
        "forces_ref": references.forces,
        "n_atoms": references.n_atoms,
    }
    known = {key: value for key, value in arrays.items() if value is not None}
    floored = {k: np.maximum(v, STD_FLOOR) if k.endswith("_std") else v for k, v in known.items()}
    np.savez(run.folder / f"{name}.npz", **floored)  # type: ignore[arg-type]
