"""`blips.load`: a model from a file, or a released one with its error bars, `load("chgnet")`.

`build_model` makes the one that a configuration describes, for training.

The posterior of a released model's readouts was conditioned once on geometries of the Materials
Project (`recipes/released_posteriors.py`) and is shipped as draws, with where it comes from.
"""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from blips.backbones import ADAPTERS, RELEASED, build, nearest
from blips.backbones import load as load_backbone
from blips.backbones.base import Backbone
from blips.config import ModelConfig
from blips.conversion import bayesianize
from blips.errors import CheckpointError, ConfigError, InputError
from blips.potential import BayesianPotential
from blips.train.checkpoint import posterior_from, read_tensors, rebuild, restore
from blips.train.objective import Model

SHIPPED = Path(__file__).parents[1] / "data" / "posteriors"


def load(
    path: str | Path, device: str | torch.device = "cpu", *, plain: bool = False, **options: Any
) -> Model:
    """Load a model: a file that `save` wrote, or a released model with its error bars.

    Released ones have names such as "chgnet", see `blips.backbones.RELEASED`, and options such as
    `weights` (a file of its package) and `trust`. Where `plain`, they come without error bars.
    """
    try:
        place = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"device {str(device)!r} cannot be used here ({reason}); use cpu, or a machine and a "
            "build of torch that have it"
        ) from None
    if is_released_name(path):
        return (load_backbone if plain else load_released)(str(path), **options).to(place)
    if not Path(path).suffix and not Path(path).exists():
        raise ConfigError(
            f"{path} is neither a file nor a released model; {nearest(str(path), RELEASED)}"
        )
    if options:
        raise ConfigError(f"{path} is no released model and takes no {', '.join(options)}")
    tensors, header = read_tensors(path)
    if "optimizer" in header:
        raise CheckpointError(
            f"{path} is the state of a training, which blips train --resume continues; its model "
            f"is {Path(path).with_name('best.safetensors')}, written after the first epoch"
        )
    model = rebuild(header.get("model"), path)
    restore(model, tensors, path, header)
    return model.to(place)


def load_once(model: str | Path) -> BayesianPotential:
    """Load a Bayesian potential; the last one is kept in memory as long as its file is the same."""
    file = Path(model)
    status = file.stat() if file.is_file() else None
    return _loaded(str(model), status and (status.st_ino, status.st_mtime_ns))


@lru_cache(maxsize=1)
def _loaded(model: str, stamp: tuple[int, int] | None) -> BayesianPotential:
    potential = load(model)
    if not isinstance(potential, BayesianPotential):
        raise InputError(f"{model} is no Bayesian potential; error bars need its posterior")
    return potential


def build_model(config: ModelConfig, seed: int = 0) -> BayesianPotential | Backbone:
    """Build a released or untrained backbone; Bayesian unless the configuration says no."""
    name, options = config.backbone, config.hyperparameters
    if config.weights is not None:
        options = {**options, "weights": config.weights, "trust": config.trust}
    if is_released(config):
        backbone = load_backbone(name, **options)
    elif config.pretrained and name in ADAPTERS:
        names = [released for released, (family, _) in RELEASED.items() if family == name]
        raise ConfigError(
            f"{name} is the name of several models: set model.backbone to one of "
            f"{', '.join(names)}, or model.pretrained=false for random weights"
        )
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            backbone = build(name, **options)
    if not config.bayes.enabled:
        return backbone
    return bayesianize(backbone, seed=seed, **config.bayes.model_dump(exclude={"enabled"}))


def is_released(config: ModelConfig) -> bool:
    """Return whether the model starts from released weights."""
    return config.pretrained and config.backbone in RELEASED


def is_released_name(name: object) -> bool:
    """Return whether this is the name of a released model, and of no file."""
    return isinstance(name, str) and name in RELEASED and not Path(name).is_file()


def load_released(name: str, **options: Any) -> BayesianPotential:
    """Load a released potential with the error bars that are shipped for it, if any.

    With options of the adapter (`weights`, `trust`) it has none until it is conditioned.
    """
    potential = bayesianize(load_backbone(name, **options))
    path = SHIPPED / f"{name}.safetensors"
    if options or not path.is_file():
        return potential
    tensors, header = read_tensors(path)
    potential.posterior = posterior_from(header["posterior"], tensors, potential, path)
    if weights_digest(potential) != header["weights"]:
        raise CheckpointError(
            f"the error bars shipped for {name} are of other weights than those installed; "
            "install the version of its package that blips names, or load it with "
            "blips.backbones.load and condition it"
        )
    return potential


def provenance(name: str) -> dict[str, Any] | None:
    """Return what a shipped posterior was made from; None where there is none."""
    path = SHIPPED / f"{name}.safetensors"
    return read_tensors(path)[1]["provenance"] if path.is_file() else None


def weights_digest(potential: BayesianPotential) -> str:
    """Digest the conditioned weights, rounded so that platforms agree."""
    digest = hashlib.sha256()
    for name in potential.conditioned().maps.roles:
        layer = potential.backbone.get_submodule(name)
        for weight in layer.parameters(recurse=False):
            digest.update(weight.detach().double().mul(1e5).round().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
