"""What the commands `train`, `finetune`, `condition` and `export` do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ase import Atoms

from blips import keys
from blips.backbones import ADAPTERS, RELEASED, build, load
from blips.backbones.base import Backbone
from blips.backbones.foreign import ForeignBackbone
from blips.config import ModelConfig, load_config
from blips.conversion import bayesianize
from blips.data.labels import Labels
from blips.data.sanity import warn_of_labels
from blips.errors import ConfigError
from blips.inference.scale import keys_of
from blips.potential import BayesianPotential
from blips.train.checkpoint import Saveable, backbone_of
from blips.train.fit import FitResult, fit
from blips.train.objective import Wrapper
from blips.train.references import align as align_energies
from blips.train.references import moved
from blips.train.released import is_released_name, usable_device
from blips.train.released import load as load_saved


def build_model(config: ModelConfig, seed: int = 0) -> BayesianPotential | Backbone:
    """Build a released or untrained backbone; Bayesian unless the configuration says no."""
    if is_released(config):
        given = {} if config.weights is None else {"weights": config.weights, "trust": config.trust}
        backbone = load(config.backbone, **config.hyperparameters | given)
    else:
        backbone = _untrained(config, seed)
    if not config.bayes.enabled:
        return backbone
    options = config.bayes.model_dump(exclude={"enabled"})
    return bayesianize(backbone, seed=seed, **options)


def train_from_config(
    sources: Sequence[str], *, resume: bool = False, only_released: bool = False
) -> FitResult:
    """Train what files and overrides describe; `only_released` refuses untrained backbones."""
    config = load_config(*sources)
    if only_released and not is_released(config.model):
        asked = config.model.backbone + " with pretrained=false" * (not config.model.pretrained)
        raise ConfigError(
            f"fine-tuning starts from released weights, and {asked} has none; set model.backbone "
            f"to one of {', '.join(sorted(RELEASED))}, or use blips train"
        )
    model = build_model(config.model, config.seed)
    return fit(model, config=config, resume=resume)


def plain_or_saved(model: str, weights: Path | None, trust: bool, device: str) -> Saveable:
    """Load a file that blips wrote, or the plain released model of that name, with `weights`."""
    place = usable_device(device)
    given = {} if weights is None else {"weights": weights, "trust": trust}
    if not is_released_name(model):
        return load_saved(model, place, **given)
    return load(model, **given).to(place)


def conditioned(
    model: Saveable,
    structures: Sequence[Atoms],
    valid: Sequence[Atoms] | None,
    *,
    anew: bool = False,
    align: bool = True,
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
    labels = options.get("labels")
    warn_of_labels(valid or (), labels)
    has = set() if valid is None else set(keys_of(valid, labels))
    released = isinstance(model, Backbone) and model.pretrained
    aligns = align and released and keys.ENERGY in has
    if valid is None or not aligns or keys.FORCES not in has:
        if valid is not None and aligns:  # first: else elements' energies would count as errors
            align_energies(potential, valid, labels)
        potential.condition(structures, valid=valid, **options)
        return potential
    forces = moved(valid, {}, (keys.FORCES,), labels)
    options["labels"] = Labels()
    potential.condition(structures, valid=forces, **options)
    std = potential.predict(valid, method="onepass", forces=False).array("energy_std")
    align_energies(potential, valid, labels, std**2)
    return potential


def export_model(path: str | Path, output: Path) -> Path:
    """Write the model of a checkpoint, its posterior means, in the format of its own package."""
    model = load_saved(path)
    backbone = backbone_of(model.to_base() if isinstance(model, BayesianPotential) else model)
    if not isinstance(backbone, ForeignBackbone):
        raise ConfigError(
            f"{path} holds a {type(backbone).__name__}, which is blips' own and has no other "
            "format; blips.save(potential.to_base(), file) writes the plain model"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    return backbone.export(output)


def is_released(config: ModelConfig) -> bool:
    """Return whether the model starts from released weights."""
    return config.pretrained and config.backbone in RELEASED


def _untrained(config: ModelConfig, seed: int) -> Backbone:
    if config.weights is not None:
        raise ConfigError(
            f"model.weights is for released models, and {config.backbone} starts untrained; "
            f"released are {', '.join(sorted(RELEASED))}"
        )
    if config.pretrained and config.backbone in ADAPTERS:
        names = [name for name, (family, _) in RELEASED.items() if family == config.backbone]
        raise ConfigError(
            f"{config.backbone} is the name of several models: set model.backbone to one of "
            f"{', '.join(names)}, or model.pretrained=false for random weights"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(config.backbone, **config.hyperparameters)
