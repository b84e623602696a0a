"""One run of the ammonia study: data, training or assembly, prediction, metrics and figures."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import studies.encoders  # noqa: F401 (knows the paper's inference networks)
from blips.backbones.base import Backbone
from blips.baselines import Baseline, DeepEnsemble, predict_plain
from blips.config import ModelConfig
from blips.conversion import bayesianize
from blips.data.dataset import StructureData
from blips.errors import ConfigError
from blips.potential import BayesianPotential
from blips.prediction import Prediction
from blips.train.fit import FitResult, fit
from blips.train.objective import Model
from blips.train.released import build_model, load
from blips.units import KCAL_PER_MOL
from blips.uq.assess import STD_FLOOR, References, assess, calibrate
from studies.ammonia.beyond import split_settings
from studies.ammonia.data import Data, load_data
from studies.baselines import (
    EmbeddingMixture,
    Evidential,
    LastLayerRigidity,
    MCDropout,
    MeanVariance,
    ShallowEnsemble,
)
from studies.errorbars.run import conditioned
from studies.spec import BLIP_TRAINING, Findings, Run

Uncertain = BayesianPotential | Baseline
Metrics = dict[str, dict[str, float | None]]

WRAPPERS: dict[str, Any] = {
    "mc_dropout": MCDropout,
    "mean_variance": MeanVariance,
    "evidential": Evidential,
    "shallow_ensemble": ShallowEnsemble,
}
ON_FEATURES: Any = {"llpr": LastLayerRigidity, "gmm": EmbeddingMixture}
UNCHANGED_BY_SCALE = ("mae", "mse", "spearman", "auroc", "rejection_auc", "auc_normalised")


def execute(run: Run) -> Findings:
    """Train (or continue, or assemble), calibrate, predict the test set, measure, draw."""
    torch.set_num_threads(1)
    settings, bootstrap = run.spec.settings, run.spec.settings["bootstrap"]
    data = load_data(settings["data"])
    references = References.of(data.test)
    model, details = trained(run, data)
    valid = References.of(data.valid)
    if isinstance(model, Backbone):
        metrics = measure(predict_plain(model, data.test), references, bootstrap)
        of_valid = measure(predict_plain(model, data.valid), valid, bootstrap)
        return Findings(metrics | {"valid_forces_mae": of_valid["forces_mae"]}, details)

    options = _options(model, settings, run.spec.seed)
    options["batch_size"] = len(data.test)  # one batch, in which every row has its own noise
    is_scaled = settings["method"]["kind"] == "conditioned"  # on validation data, by itself
    fitted = {} if is_scaled else calibrate(model, data.valid, **options)
    as_predicted = model.predict(data.test, calibrated=False, **options)
    calibrated = as_predicted.recalibrated(model.calibration)
    metrics = measure(as_predicted, references, bootstrap)
    for name, found in measure(calibrated, references, bootstrap).items():
        if not name.endswith(UNCHANGED_BY_SCALE):
            metrics[f"{name}_calibrated"] = found
    if isinstance(model, BayesianPotential):
        of_means = measure(model.predict(data.test, method="map"), references, bootstrap)
        metrics |= {f"{name}_map": of_means[name] for name in ("energy_mae", "forces_mae")}
        of_valid = measure(model.predict(data.valid, method="map"), valid, bootstrap)
        metrics["valid_forces_mae"] = of_valid["forces_mae"]
    details["calibration"] = {name: found.to_dict() for name, found in fitted.items()}
    _draw(run, arrays(as_predicted, references), arrays(calibrated, references))
    return Findings(metrics, details)


def build_method(settings: Mapping[str, Any], seed: int) -> Model:
    """Build the untrained model of a method; all methods of a seed share its backbone."""
    options = dict(settings["method"])
    kind = options.pop("kind")
    if kind not in ("base", "blip", *WRAPPERS):
        known = ", ".join(("base", "blip", *WRAPPERS))
        raise ConfigError(f"method {kind!r} is not trained; use one of {known}")
    bayes = {"enabled": True, **options} if kind == "blip" else {"enabled": False}
    config = ModelConfig.model_validate(
        {"backbone": "painn", "hyperparameters": settings["hyperparameters"], "bayes": bayes}
    )
    model = build_model(config, seed)
    if kind not in WRAPPERS:
        return model
    seeded = {} if kind == "mc_dropout" else {"seed": seed}
    return WRAPPERS[kind](model, **options, **seeded)


def trained(run: Run, data: Data) -> tuple[Backbone | Uncertain, dict[str, Any]]:
    """Train; return the model of the best validation loss and the training's history."""
    settings, seed = run.spec.settings, run.spec.seed
    if settings["method"]["kind"] == "blip_afterwards":
        model: Model = _with_posterior(run)
    elif run.needs:
        return _assembled(run, data), {"built_on": list(run.needs)}
    else:
        model = build_method(settings, seed)
    training, objective = split_settings({**BLIP_TRAINING, **settings["training"]})
    result = fit(
        model,
        data.train,
        valid=data.valid,
        config={"training": training, "seed": seed},
        objective=objective,
        folder=run.folder,
        resume=True,
    )
    return model, _history(result, model, data)  # type: ignore[return-value]


def _with_posterior(run: Run) -> BayesianPotential:
    """Give a trained plain model a posterior around its weights, which stay fixed."""
    options = {key: value for key, value in run.spec.settings["method"].items() if key != "kind"}
    (folder,) = run.needs.values()
    parent = load(folder / "best.safetensors")
    if not isinstance(parent, Backbone):
        raise ConfigError(f"{', '.join(run.needs)} has a posterior already")
    options["bounds"] = tuple(options["bounds"])
    return bayesianize(parent, **options, seed=run.spec.seed)


def _assembled(run: Run, data: Data) -> Uncertain:
    """Assemble a model of trained ones, without training of its own."""
    options = dict(run.spec.settings["method"])
    kind = options.pop("kind")
    parents = [load(folder / "best.safetensors") for folder in run.needs.values()]
    if kind in ("frozen", "sampled") and isinstance(parents[0], BayesianPotential):
        return parents[0]
    if kind == "conditioned":
        return conditioned(parents[0], data.train, data.valid, seed=run.spec.seed, **options)
    plain = [parent for parent in parents if isinstance(parent, Backbone)]
    if len(plain) != len(parents) or kind not in ("deep_ensemble", *ON_FEATURES):
        raise ConfigError(f"method {kind!r} cannot be made of {', '.join(run.needs)}")
    if kind == "deep_ensemble":
        return DeepEnsemble(plain)
    model = ON_FEATURES[kind](plain[0], **options)
    cutoff = run.spec.settings["hyperparameters"]["cutoff"]
    model.condition(StructureData(data.train, cutoff), StructureData(data.valid, cutoff))
    return model


def _history(result: FitResult, model: torch.nn.Module, data: Data) -> dict[str, Any]:
    progress = result.progress
    return {
        "structures": {"train": len(data.train), "valid": len(data.valid), "test": len(data.test)},
        "parameters": sum(p.numel() for p in model.parameters()),
        "epochs": progress.epoch,
        "best_epoch": progress.best_epoch,
        "best_valid_loss": progress.best_loss,
        "last_epoch": progress.history[-1],
    }


def _options(model: Uncertain, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the options of the model's predictions."""
    options: dict[str, Any] = {"seed": seed}
    if isinstance(model, BayesianPotential | MCDropout):
        options["samples"] = settings["samples"]
    if isinstance(model, BayesianPotential):
        kind = settings["method"]["kind"]
        options["method"] = kind if kind in ("frozen", "conditioned") else "mc"
    return options


def arrays(prediction: Prediction, references: References) -> dict[str, np.ndarray]:
    """Return predictions and labels in kcal/mol and A, with no std of zero."""
    found = {
        "energy": prediction.energy,
        "energy_std": prediction.energy_total_std,
        "energy_ref": references.energy,
        "forces": prediction.forces,
        "forces_std": prediction.forces_total_std,
        "forces_ref": references.forces,
    }
    return {
        name: (np.maximum(array, STD_FLOOR) if name.endswith("_std") else array) / KCAL_PER_MOL
        for name, array in found.items()
        if array is not None
    }


def measure(prediction: Prediction, references: References, bootstrap: int) -> Metrics:
    """Compute metrics with bootstrap intervals over structures.

    `energy_` is of structures and `forces_` of components (`nll` and `crps_sum` add the three of
    an atom, `crps` averages them); `atom_` and `structure_` rank atoms and structures by their
    forces; errors and `ece` of a structure are of its mean force norm.
    """
    scaled = arrays(prediction, references)
    labels = {name: scaled.pop(f"{name}_ref") for name in ("energy", "forces")}
    evaluation = assess(
        Prediction.of(scaled, n_atoms=references.n_atoms, method="scaled", samples=0),
        References(references.n_atoms, references.numbers, **labels),
        n_bootstrap=bootstrap,
    )
    by_level = {
        "energy": evaluation.energy,
        "forces": evaluation.forces,
        "atom": evaluation.forces_per_atom,
        "structure": evaluation.forces_per_structure,
    }
    return {
        f"{level}_{name}": {"value": found.value, "low": found.low, "high": found.high}
        for level, table in by_level.items()
        for name, found in table.items()
        if np.isfinite(found.value)
    }


def _draw(run: Run, as_predicted: dict[str, np.ndarray], calibrated: dict[str, np.ndarray]) -> None:
    """Plot errors against std, and reliability before and after calibration; save the numbers."""
    from blips.uq.plots import reliability, std_error

    np.savez(run.folder / "test.npz", **as_predicted)  # type: ignore[arg-type]
    models = {
        label: (found["forces"], found["forces_std"], found["forces_ref"])
        for label, found in (("as predicted", as_predicted), ("calibrated", calibrated))
    }
    plots = {
        "std_error": std_error(*models["as predicted"], unit="kcal/mol/Å"),
        "reliability": reliability(models),
    }
    run.figures.mkdir(parents=True, exist_ok=True)
    for name, plot in plots.items():
        plot.figure().savefig(run.figures / f"{run.spec.id}-{name}.png")
