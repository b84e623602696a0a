"""One run of the n-body study: data, training, prediction, metrics and figures."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import studies.encoders  # noqa: F401 (knows the paper's inference networks)
from blips.backbones.base import Backbone
from blips.baselines import DeepEnsemble, predict_plain
from blips.config import ModelConfig
from blips.errors import ConfigError
from blips.files import write_atomically
from blips.potential import BayesianPotential
from blips.prediction import Prediction
from blips.train.fit import FitResult, fit
from blips.train.released import build_model, load
from blips.uq.assess import References, assess
from studies.baselines import MCDropout
from studies.nbody.data import POSITIONS, ParticleData
from studies.nbody.simulations import NBodySplit, generate, load_nbody
from studies.spec import BLIP_TRAINING, Findings, Run

Trainable = Backbone | BayesianPotential | MCDropout
Trained = Trainable | DeepEnsemble
Metrics = dict[str, dict[str, float | None]]

TEST_BATCH = 100  # simulations
CURVE_SAMPLES = 20
RANKING = ("spearman", "auroc", "rejection_auc_normalised")


def execute(run: Run) -> Findings:
    """Train (or continue, or assemble), predict the test set, measure, draw."""
    torch.set_num_threads(1)
    settings, seed = run.spec.settings, run.spec.seed
    data = load_data(settings["data"])
    model, details = _trained(run, data)
    prediction = predict(model, data["test"], settings["samples"], seed)
    target = data["test"].targets.reshape(-1, 3).double().numpy()  # [N, 3]
    metrics = measure(prediction, target, settings["bootstrap"])
    if isinstance(model, BayesianPotential):
        means = predict(model, data["test"], 0, seed)
        metrics["mse_map"] = measure(means, target, settings["bootstrap"])["mse"]
    if f"{POSITIONS}_std" in prediction.others:
        np.savez(
            run.folder / "test.npz",
            mean=prediction.array(POSITIONS),
            std=prediction.array(f"{POSITIONS}_std"),
            target=target,
        )
        draw(run, prediction, target)
    return Findings(metrics, details)


def load_data(settings: Mapping[str, Any]) -> dict[str, ParticleData]:
    """Load training, validation and test simulations."""
    sizes: Mapping[str, int] = settings["sizes"]
    splits: dict[str, NBodySplit] = {}
    if settings["whole_stream"]:
        splits = {
            "train": load_nbody("train", size=sizes["train"]),
            "valid": load_nbody("valid", size=sizes["valid"]),
            "test": load_nbody("test", size=sizes["test"]),
        }
    else:
        made = generate(sizes["train"], sizes["valid"], sizes["test"], threads=1)
        for name, part in made.items():
            now, later = part.positions[:, 0], part.positions[:, 1]
            splits[name] = NBodySplit(now, part.velocities[:, 0], part.charges, later)
    return {
        name: ParticleData(
            part.positions,
            part.velocities,
            part.charges,
            part.target_positions,
            dtype=torch.float32,
            source=f"n-body {name}",
        )
        for name, part in splits.items()
    }


def build_method(settings: Mapping[str, Any], seed: int) -> Trainable:
    """Build the untrained model of a method; all methods of a seed share its backbone."""
    options = dict(settings["method"])
    kind = options.pop("kind")
    if kind not in ("base", "blip", "mc_dropout"):
        raise ConfigError(f"method {kind!r} is not trained; use base, blip or mc_dropout")
    bayes = {"enabled": True, **options} if kind == "blip" else {"enabled": False}
    config = ModelConfig.model_validate(
        {
            "backbone": settings["backbone"],
            "hyperparameters": settings["hyperparameters"],
            "bayes": bayes,
        }
    )
    model = build_model(config, seed)
    if kind == "mc_dropout" and isinstance(model, Backbone):
        return MCDropout(model, rate=options["rate"])
    return model


def _trained(run: Run, data: Mapping[str, ParticleData]) -> tuple[Trained, dict[str, Any]]:
    """Train; return the model of the best validation loss and the training's history."""
    settings, seed = run.spec.settings, run.spec.seed
    if settings["method"]["kind"] == "deep_ensemble":
        members = [load(folder / "best.safetensors") for folder in run.needs.values()]
        plain = [member for member in members if isinstance(member, Backbone)]
        return DeepEnsemble(plain), {"members": list(run.needs)}
    config = {"training": {**BLIP_TRAINING, **settings["training"]}, "seed": seed}
    curve = _measured_on_the_way(run, config, data)
    model = build_method(settings, seed)
    result = fit(
        model, data["train"], valid=data["valid"], config=config, folder=run.folder, resume=True
    )
    return model, _history(result, model) | ({"curve": curve} if curve else {})


def _measured_on_the_way(
    run: Run, config: Mapping[str, Any], data: Mapping[str, ParticleData]
) -> dict[str, Any]:
    """Compute validation metrics of the best model after so many epochs, by epochs.

    They are kept in the run's folder, so that a run that is continued has those before as well.
    """
    settings, seed = run.spec.settings, run.spec.seed
    path = run.folder / "curve.json"
    curve: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    target = data["valid"].targets.reshape(-1, 3).double().numpy()
    for epochs in settings.get("milestones", ()):
        if str(epochs) in curve:
            continue
        model = build_method(settings, seed)
        shorter = {**config, "training": {**config["training"], "epochs": epochs}}
        fit(
            model,
            data["train"],
            valid=data["valid"],
            config=shorter,
            folder=run.folder,
            resume=True,
        )
        found = measure(predict(model, data["valid"], CURVE_SAMPLES, seed), target, 0)
        curve[str(epochs)] = {
            name: found[name]["value"] for name in ("mse", "nll", "crps") if name in found
        }
        write_atomically(path, json.dumps(curve).encode())
    return curve


def _history(result: FitResult, model: torch.nn.Module) -> dict[str, Any]:
    progress = result.progress
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "epochs": progress.epoch,
        "best_epoch": progress.best_epoch,
        "best_valid_mse": progress.best_loss,
        "last_epoch": progress.history[-1],
    }


def predict(model: Trained, data: ParticleData, samples: int, seed: int) -> Prediction:
    """Predict positions and their std; without samples, those of the posterior means."""
    parts: list[Prediction] = []
    for number, first in enumerate(range(0, len(data), TEST_BATCH)):
        graph = data.batch(list(range(first, min(first + TEST_BATCH, len(data))))).graph
        noise_seed = 1_000_000 * seed + number  # batches have noise of their own
        if isinstance(model, BayesianPotential) and samples == 0:
            parts.append(model.predict(graph, method="map"))
        elif isinstance(model, BayesianPotential | MCDropout):
            parts.append(model.predict(graph, samples=samples, seed=noise_seed))
        elif isinstance(model, DeepEnsemble):
            parts.append(model.predict(graph))
        else:
            parts.append(predict_plain(model, graph))
    return Prediction.join(parts)


def measure(prediction: Prediction, target: np.ndarray, bootstrap: int) -> Metrics:
    """Compute metrics with bootstrap intervals over simulations.

    Names without suffix are of components (`nll` and `crps_sum` add the three of a particle,
    `crps` averages them); `_particle` and `_structure` rank particles and simulations.
    """
    as_forces = replace(
        prediction,
        forces=prediction.array(POSITIONS),
        forces_std=prediction.others.get(f"{POSITIONS}_std"),
    )
    no_elements = np.zeros(len(target), dtype=int)
    references = References(prediction.n_atoms, no_elements, energy=None, forces=target)
    evaluation = assess(as_forces, references, n_bootstrap=bootstrap)
    named = dict(evaluation.forces)
    by_level = {
        "particle": evaluation.forces_per_atom,
        "structure": evaluation.forces_per_structure,
    }
    for level, ranking in by_level.items():
        named |= {f"{name}_{level}": ranking[name] for name in RANKING if name in ranking}
    return {
        name: {"value": found.value, "low": found.low, "high": found.high}
        for name, found in named.items()
    }


def draw(run: Run, prediction: Prediction, target: np.ndarray) -> None:
    """Plot error against std, and reliability, as PNG."""
    from blips.uq.plots import reliability, std_error

    run.figures.mkdir(parents=True, exist_ok=True)
    mean, std = prediction.array(POSITIONS), prediction.array(f"{POSITIONS}_std")
    plots = {
        "std_error": std_error(mean, std, target, quantity="position components", unit="box units"),
        "reliability": reliability({run.spec.name: (mean, std, target)}),
    }
    for name, plot in plots.items():
        plot.figure().savefig(run.figures / f"{run.spec.id}-{name}.png")
