"""What `blips train` does: build the model that a configuration describes, and fit it."""

from collections.abc import Sequence

import torch

from blips.backbones import build
from blips.backbones.base import Backbone
from blips.config import ModelConfig, load_config
from blips.factory import bayesianize
from blips.potential import BayesianPotential
from blips.train.fit import FitResult, fit


def build_model(config: ModelConfig, seed: int = 0) -> BayesianPotential | Backbone:
    """Backbone with random weights, Bayesian unless the configuration says otherwise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = build(config.backbone, **config.hyperparameters)
    if not config.bayes.enabled:
        return backbone
    options = config.bayes.model_dump(exclude={"enabled"})
    return bayesianize(backbone, seed=seed, **options)


def train_from_config(sources: Sequence[str], *, resume: bool = False) -> FitResult:
    """Train what the configuration files and overrides describe."""
    config = load_config(*sources)
    model = build_model(config.model, config.seed)
    return fit(model, config=config, resume=resume)
