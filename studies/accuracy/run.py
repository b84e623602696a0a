"""One run of the study of accuracy: training in one or two stages, errors near and far."""

from typing import Any

import torch

from blips.backbones.base import Backbone
from blips.baselines import predict_plain
from blips.config import ModelConfig
from blips.potential import BayesianPotential
from blips.train.fit import fit
from blips.train.objective import Model
from blips.train.released import build_model
from studies.errorbars.data import NearFar, load_set
from studies.errorbars.run import measure
from studies.silica.data import load_data
from studies.spec import Findings, Run


def execute(run: Run) -> Findings:
    """Train (or continue), and measure errors of validation, near and far structures."""
    torch.set_num_threads(1)
    settings = run.spec.settings
    data = _load(settings["data"])
    model, history = _trained(run, data)
    metrics: dict[str, dict[str, float | None]] = {}
    for where, structures in (("valid", data.valid), ("near", data.near), ("far", data.far)):
        tested = structures[: settings["tested"]]
        metrics |= measure(predict_plain(model, tested), tested, 0, where)
    return Findings(metrics, {"best_epoch": history.best_epoch, "best_loss": history.best_loss})


def _load(name: str) -> NearFar:
    """Load a set of the study errorbars, or silica: topologies that are known, and new ones."""
    kind, _, count = name.partition("-")
    if kind != "silica":
        return load_set(name)
    data = load_data({"train": int(count), "valid": 16, "calibration": 0, "known": 50, "new": 50})
    return NearFar(data.train, data.valid, data.tests["known"], data.tests["new"])


def _trained(run: Run, data: NearFar) -> tuple[Backbone, Any]:
    """Train as the recipe begins, then plain, if epochs are left; return model and history."""
    settings = run.spec.settings
    model, history = _build(run, None), None
    if "first" in settings:
        first = settings["first"]
        model = _build(run, first["bayes"])
        history = _train(run, model, data, {**first["training"], "condition": False}, "first")
    plain = model if isinstance(model, Backbone) else model.to_base()
    if settings["training"]["epochs"]:
        history = _train(run, plain, data, settings["training"], "plain")
    return plain, history


def _build(run: Run, bayes: dict[str, Any] | None) -> Backbone | BayesianPotential:
    """Build the model to train; all recipes of a seed and width start from the same weights."""
    config = {
        **run.spec.settings["model"],
        "bayes": {"enabled": bayes is not None, **(bayes or {})},
    }
    return build_model(ModelConfig.model_validate(config), run.spec.seed)


def _train(run: Run, model: Model, data: NearFar, training: dict[str, Any], stage: str) -> Any:
    """Train in a folder of the stage's own; a finished stage is read from there."""
    return fit(
        model,
        data.train,
        valid=data.valid,
        config={"training": training, "seed": run.spec.seed},
        folder=run.folder / stage,
        resume=True,
    ).progress
