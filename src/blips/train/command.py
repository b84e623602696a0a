"""Models that configurations describe, and models that are conditioned."""

from collections.abc import Sequence
from typing import Any

import torch
from ase import Atoms

from blips import keys
from blips.backbones import ADAPTERS, RELEASED, build, load
from blips.backbones.base import Backbone
from blips.config import ModelConfig
from blips.conversion import bayesianize
from blips.data.labels import Labels
from blips.data.sanity import warn_of_labels
from blips.errors import ConfigError
from blips.inference.scale import keys_of
from blips.potential import BayesianPotential
from blips.train.checkpoint import Saveable
from blips.train.objective import Wrapper
from blips.train.references import align as align_energies
from blips.train.references import moved


def build_model(config: ModelConfig, seed: int = 0) -> BayesianPotential | Backbone:
    """Build a released or untrained backbone; Bayesian unless the configuration says no."""
    name = config.backbone
    if is_released(config):
        given = {} if config.weights is None else {"weights": config.weights, "trust": config.trust}
        backbone = load(name, **config.hyperparameters | given)
    elif config.weights is not None:
        raise ConfigError(
            f"model.weights is for released models, and {name} starts untrained; released are "
            f"{', '.join(sorted(RELEASED))}"
        )
    elif config.pretrained and name in ADAPTERS:
        names = [released for released, (family, _) in RELEASED.items() if family == name]
        raise ConfigError(
            f"{name} is the name of several models: set model.backbone to one of "
            f"{', '.join(names)}, or model.pretrained=false for random weights"
        )
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            backbone = build(name, **config.hyperparameters)
    if not config.bayes.enabled:
        return backbone
    return bayesianize(backbone, seed=seed, **config.bayes.model_dump(exclude={"enabled"}))


def conditioned(
    model: Saveable,
    structures: Sequence[Atoms],
    valid: Sequence[Atoms] | None,
    *,
    anew: bool = False,
    align: bool = True,
    labels: Labels | None = None,
    **options: Any,
) -> BayesianPotential:
    """Condition a model on geometries, with labelled ones for the scale of its error bars.

    What it was conditioned on before is forgotten if `anew`. Energies per element of a released
    model are fitted to those of `valid` if `align`. Options are those of `condition`.
    """
    if isinstance(model, Wrapper):
        raise ConfigError(f"this is a {model.kind}, which has error bars of its own")
    potential = bayesianize(model) if isinstance(model, Backbone) else model
    if anew:
        potential.posterior = None
    warn_of_labels(valid or (), labels)
    has = () if valid is None else keys_of(valid, labels)
    released = isinstance(model, Backbone) and model.pretrained
    if valid is None or not (align and released and keys.ENERGY in has):
        potential.condition(structures, valid=valid, labels=labels, **options)
    elif keys.FORCES not in has:  # aligned first: else elements' energies would count as errors
        align_energies(potential, valid, labels)
        potential.condition(structures, valid=valid, labels=labels, **options)
    else:
        forces = moved(valid, {}, (keys.FORCES,), labels)
        potential.condition(structures, valid=forces, labels=Labels(), **options)
        std = potential.predict(valid, method="onepass", forces=False).array("energy_std")
        align_energies(potential, valid, labels, std**2)
    return potential


def is_released(config: ModelConfig) -> bool:
    """Return whether the model starts from released weights."""
    return config.pretrained and config.backbone in RELEASED
