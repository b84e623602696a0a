"""One run of the study of error bars: training or assembly, prediction, metrics near and far."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from ase import Atoms
from scipy.stats import norm

import studies.encoders  # noqa: F401 (knows the paper's inference networks)
from blips.backbones.base import Backbone
from blips.baselines import Baseline, DeepEnsemble, predict_plain
from blips.config import ModelConfig
from blips.conversion import bayesianize
from blips.data.dataset import StructureData
from blips.errors import ConfigError
from blips.potential import BayesianPotential
from blips.prediction import Prediction
from blips.train.fit import fit
from blips.train.objective import Model
from blips.train.released import build_model, load
from blips.uq.assess import References, assess, calibrate
from studies.baselines import EmbeddingMixture, LastLayerRigidity, ShallowEnsemble
from studies.errorbars.data import NearFar, load_set
from studies.spec import Findings, Run

Uncertain = BayesianPotential | Baseline
LEVELS = tuple(round(0.05 * k, 2) for k in range(1, 20))
Metrics = dict[str, dict[str, float | None]]
ON_FEATURES: Any = {"llpr": LastLayerRigidity, "gmm": EmbeddingMixture}


def execute(run: Run) -> Findings:
    """Train (or continue, or assemble), calibrate on near data, predict both sets, measure."""
    torch.set_num_threads(1)
    settings = run.spec.settings
    data = load_set(settings["data"])
    model, details = trained(run, data)
    options = _options(model, settings, run.spec.seed)
    if not isinstance(model, Backbone) and settings["method"]["kind"] != "conditioned":
        fitted = calibrate(model, data.valid, **options)
        details["calibration"] = {name: found.to_dict() for name, found in fitted.items()}
    metrics: Metrics = {}
    for where, structures in (("near", data.near), ("far", data.far), ("valid", data.valid)):
        tested = structures[: settings["tested"]]
        found = _predict(model, tested, options)
        metrics |= measure(found, tested, settings["bootstrap"], where)
        if (curve := covered(found, tested)) is not None:
            details.setdefault("covered", {})[where] = curve
    if isinstance(model, BayesianPotential) and model.posterior is not None:
        details["posterior"] = str(model.posterior)
    return Findings(metrics, details)


def covered(prediction: Prediction, structures: Sequence[Atoms]) -> list[float] | None:
    """Compute the share of force components within the central interval of each of `LEVELS`."""
    target = References.of(structures).forces
    if prediction.forces_total_std is None or target is None:
        return None
    z = np.abs(prediction.array("forces") - target) / np.maximum(prediction.forces_total_std, 1e-6)
    return [float((z < norm.ppf(0.5 + level / 2)).mean()) for level in LEVELS]


def trained(run: Run, data: NearFar) -> tuple[Backbone | Uncertain, dict[str, Any]]:
    """Train; return the model of the best validation loss and the training's history."""
    settings, seed = run.spec.settings, run.spec.seed
    if run.needs:
        return _assembled(run, data), {"built_on": list(run.needs)}
    model = build_method(settings, seed)
    result = fit(
        model,
        data.train,
        valid=data.valid,
        config={"training": settings["training"], "seed": seed},
        folder=run.folder,
        resume=True,
    )
    progress = result.progress
    details = {"best_epoch": progress.best_epoch, "best_valid_loss": progress.best_loss}
    return model, details  # type: ignore[return-value]


def build_method(settings: Mapping[str, Any], seed: int) -> Model:
    """Build the untrained model of a method; all methods of a seed share its backbone."""
    options = dict(settings["method"])
    kind = options.pop("kind")
    bayes = {"enabled": True, **options} if kind == "blip" else {"enabled": False}
    config = ModelConfig.model_validate(
        {"backbone": "painn", "hyperparameters": settings["hyperparameters"], "bayes": bayes}
    )
    model = build_model(config, seed)
    if kind == "shallow_ensemble":
        return ShallowEnsemble(model, **options, seed=seed)  # type: ignore[arg-type]
    return model


def _assembled(run: Run, data: NearFar) -> Uncertain:
    """Assemble a model of trained ones, without training of its own."""
    options = dict(run.spec.settings["method"])
    kind = options.pop("kind")
    parents = [load(folder / "best.safetensors") for folder in run.needs.values()]
    if kind == "conditioned":
        return conditioned(parents[0], data.train, data.valid, seed=run.spec.seed, **options)
    plain = [parent for parent in parents if isinstance(parent, Backbone)]
    if len(plain) != len(parents):
        raise ConfigError(f"method {kind!r} cannot be made of {', '.join(run.needs)}")
    if kind == "deep_ensemble":
        return DeepEnsemble(plain)
    model = ON_FEATURES[kind](plain[0], **options)
    cutoff = run.spec.settings["hyperparameters"]["cutoff"]
    model.condition(StructureData(data.train, cutoff), StructureData(data.valid, cutoff))
    return model


def conditioned(
    trained: Model, train: list[Atoms], valid: list[Atoms], **options: Any
) -> BayesianPotential:
    """Condition a trained model on the structures that it was trained on."""
    potential = trained if isinstance(trained, BayesianPotential) else bayesianize(trained)  # pyright: ignore[reportArgumentType]
    potential.posterior = None  # of its training
    potential.condition(train, valid=valid, **options)
    return potential


def _options(model: object, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the options of the model's predictions."""
    if not isinstance(model, BayesianPotential):
        return {"seed": seed}
    kind = settings["method"]["kind"]
    method = "conditioned" if kind == "conditioned" else "mc"
    return {"seed": seed, "samples": settings["samples"], "method": method}


def _predict(
    model: Backbone | Uncertain, structures: Sequence[Atoms], options: Mapping[str, Any]
) -> Prediction:
    if isinstance(model, Backbone):
        return predict_plain(model, structures)
    return model.predict(structures, **options)


def measure(
    prediction: Prediction, structures: Sequence[Atoms], bootstrap: int, where: str
) -> Metrics:
    """Compute metrics with bootstrap intervals over structures, names prefixed with `where`."""
    evaluation = assess(prediction, References.of(structures), n_bootstrap=bootstrap)
    by_level = {
        "energy": evaluation.energy,
        "forces": evaluation.forces,
        "atom": evaluation.forces_per_atom,
        "structure": evaluation.forces_per_structure,
    }
    return {
        f"{where}_{level}_{name}": {"value": found.value, "low": found.low, "high": found.high}
        for level, table in by_level.items()
        for name, found in table.items()
        if found.value == found.value
    }
