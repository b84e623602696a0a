"""`blips.load`: a model from a file, or a released one with its error bars, `load("chgnet")`.

The posterior of a released model's readouts was conditioned once on geometries of the Materials
Project (`recipes/released_posteriors.py`) and is shipped as draws, with where it comes from.
"""

import hashlib
from contextlib import AbstractContextManager
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from blips.backbones import RELEASED, nearest
from blips.backbones import load as load_backbone
from blips.conversion import bayesianize
from blips.errors import CheckpointError, ConfigError, InputError
from blips.potential import BayesianPotential
from blips.train import checkpoint
from blips.train.checkpoint import Saveable, posterior_from, read_tensors

FOLDER = "posteriors"


def load(path: str | Path, device: str | torch.device = "cpu", **options: Any) -> Saveable:
    """Load a model: a file that `save` wrote, or a released model with its error bars.

    Released ones have names such as "chgnet", see `blips.backbones.RELEASED`, and options such as
    `weights` (a file of its package) and `trust`.
    """
    place = usable_device(device)
    if is_released_name(path):
        return load_released(str(path), **options).to(place)
    if not Path(path).suffix and not Path(path).exists():
        raise ConfigError(
            f"{path} is neither a file nor a released model; {nearest(str(path), RELEASED)}"
        )
    if options:
        raise ConfigError(f"{path} is no released model and takes no {', '.join(options)}")
    return checkpoint.load(path, place)


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


def usable_device(name: str | torch.device) -> torch.device:
    """Return the device of that name; raise an error where this machine has none such."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"device {str(name)!r} cannot be used here ({reason}); use cpu, or a machine and a "
            "build of torch that have it"
        ) from None


def is_released_name(name: object) -> bool:
    """Return whether this is the name of a released model, and of no file."""
    return isinstance(name, str) and name in RELEASED and not Path(name).is_file()


def load_released(name: str, **options: Any) -> BayesianPotential:
    """Load a released potential with the error bars that are shipped for it, if any.

    With options of the adapter (`weights`, `trust`) it has none until it is conditioned.
    """
    potential = bayesianize(load_backbone(name, **options))
    with _shipped(name) as path:
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
    with _shipped(name) as path:
        return read_tensors(path)[1]["provenance"] if path.is_file() else None


def weights_digest(potential: BayesianPotential) -> str:
    """Digest the conditioned weights, rounded so that platforms agree."""
    digest = hashlib.sha256()
    for name in potential.conditioned().maps.roles:
        layer = potential.backbone.get_submodule(name)
        for weight in layer.parameters(recurse=False):
            digest.update(weight.detach().double().mul(1e5).round().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _shipped(name: str) -> AbstractContextManager[Path]:
    """Return the path of a shipped posterior, whether there is one or not."""
    return resources.as_file(resources.files("blips.data") / FOLDER / f"{name}.safetensors")
