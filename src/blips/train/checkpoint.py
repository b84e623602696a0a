"""Checkpoints: one safetensors file with its description as JSON in the header.

No pickle, so reading an untrusted file runs no code; a checksum over header and tensors finds
damage; files are written beside their target and moved into place, so a crash leaves the old one
whole.

`save` is for models, which `blips.train.released.load` reads; training states use `write_tensors`
and `read_tensors`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from blips.backbones import build, family_of
from blips.backbones.base import Backbone
from blips.conversion import from_settings
from blips.data.labels import Labels
from blips.errors import CheckpointError
from blips.files import write_atomically
from blips.inference.alignment import Alignment
from blips.inference.maps import ChosenMaps
from blips.inference.posterior import ConditionedPosterior
from blips.potential import BayesianPotential
from blips.prediction import UNCERTAIN
from blips.train.objective import Model, Wrapper, backbone_of
from blips.uq.calibrate import calibrator_from_dict

FORMAT = "blips-2"
POSTERIOR, ALIGNMENT = "posterior.", "alignment."  # prefixes of their tensors
LARGEST_SIZE = 10_000  # of a hyperparameter: features, blocks, ...
DTYPES = {"float32": torch.float32, "float64": torch.float64}

Tensors = Mapping[str, Tensor]
Header = Mapping[str, Any]


def save(potential: Model, path: str | Path) -> Path:
    """Write a model to `path` (.safetensors); `blips.load` gives it back."""
    backbone = backbone_of(potential)
    if family_of(backbone) is None:
        raise CheckpointError(
            f"{type(backbone).__name__} is not one of blips' own backbones, so a file could not "
            "build it again; keep the weights, torch.save(model.state_dict(), file), and give "
            "them to a model that you build as you built this one, with its load_state_dict"
        )
    return write_model(path, potential)


def write_model(path: str | Path, model: Model, **more: Any) -> Path:
    """Write weights, posterior and alignment, also of a model that only its maker builds again."""
    tensors = dict(model.state_dict())
    if isinstance(model, BayesianPotential):
        for prefix, part in ((POSTERIOR, model.posterior), (ALIGNMENT, model.alignment)):
            if part is not None:
                tensors |= {f"{prefix}{k}": v for k, v in part.tensors().items()}
    return write_tensors(path, tensors, {"model": describe(model), **more})


def describe(model: Model) -> dict[str, Any]:
    """Describe all but the weights that `rebuild` needs, JSON-able; no backbone if it cannot."""
    backbone = backbone_of(model)
    description: dict[str, Any] = {
        "backbone": family_of(backbone),
        "hyperparameters": backbone.hyperparameters,
        "dtype": str(next(backbone.parameters()).dtype).removeprefix("torch."),
    }
    if backbone.labels not in (None, Labels()):
        description["labels"] = asdict(backbone.labels)
    if isinstance(model, BayesianPotential):
        description["bayes"] = model.settings
        for name in ("posterior", "alignment"):
            part = getattr(model, name)
            description[name] = None if part is None else part.to_dict()
    if isinstance(model, Wrapper):
        description["wrapper"] = {"kind": model.kind, "settings": model.settings}
    if not isinstance(model, Backbone):
        description["calibration"] = {
            quantity: calibrator.to_dict() for quantity, calibrator in model.calibration.items()
        }
    return description


def error_bars(model: Model) -> str:
    """Say in words where the error bars of a model come from."""
    if isinstance(model, Backbone):
        return "none; blips condition gives it some"
    words = type(model).__name__
    if isinstance(model, BayesianPotential):
        words = str(model.posterior or "the paper's posterior; not conditioned on data")
    known = ", ".join(model.calibration)
    return f"{words}; calibrated for {known}" if known else words


def rebuild(description: Any, path: str | Path) -> Model:
    """Make a model with the described architecture and arbitrary weights."""
    if isinstance(description, dict) and description.get("backbone", "") is None:
        raise CheckpointError(
            f"{path} has the weights of a model that blips cannot build by itself; build it as "
            "before and give them to its load_state_dict: read_tensors(path)[0] of "
            "blips.train.checkpoint"
        )
    with _reading("a model", path):
        for name, value in description["hyperparameters"].items():  # before memory is asked for
            if isinstance(value, int) and abs(value) > LARGEST_SIZE:
                raise CheckpointError(f"{name}={value} is larger than {LARGEST_SIZE}")
        backbone = build(description["backbone"], **description["hyperparameters"])
        backbone.to(DTYPES[description["dtype"]])
        if "labels" in description:
            backbone.labels = Labels(**description["labels"])
        if "bayes" in description:
            model = from_settings(backbone, description["bayes"])
        elif "wrapper" in description:
            import_module("blips.baselines")  # its kinds are known once it is imported
            kind, settings = description["wrapper"]["kind"], description["wrapper"]["settings"]
            if kind not in Wrapper.kinds:
                raise CheckpointError(f"unknown kind {kind!r}; import the module that defines it")
            model = Wrapper.kinds[kind].rebuilt(backbone, settings)
        else:
            return backbone
        for quantity, saved in description["calibration"].items():
            if quantity not in UNCERTAIN:
                raise CheckpointError(f"a calibration of {quantity!r}, which no model predicts")
            model.calibration[quantity] = calibrator_from_dict(saved)
        return model


@contextmanager
def _reading(what: str, path: str | Path) -> Iterator[None]:
    """Turn whatever a description that makes no sense raises into an error with the file's name."""
    try:
        yield
    # RuntimeError and MemoryError are what torch and Python raise for sizes that no memory has
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError, MemoryError) as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(
            f"{path} does not describe {what} that this version of blips can build "
            f"({type(error).__name__}: {reason}); was it made by blips.save?"
        ) from error


def restore(
    model: torch.nn.Module, tensors: Tensors, path: str | Path, header: Header | None = None
) -> None:
    """Load weights and, with a header, the posterior and the alignment that it describes."""
    beside = (POSTERIOR, ALIGNMENT)
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith(beside)}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the weights in {path} do not fit its model: {reason}") from None
    if header is None or not isinstance(model, BayesianPotential):
        return
    described = header.get("model", {})
    model.posterior, model.alignment = None, None
    if content := described.get("posterior"):
        model.posterior = posterior_from(content, under(POSTERIOR, tensors), model, path)
    if content := described.get("alignment"):
        with _reading("an alignment", path):
            model.alignment = Alignment.from_dict(content, under(ALIGNMENT, tensors))


def under(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def posterior_from(
    described: Header, tensors: Tensors, model: BayesianPotential, path: str | Path
) -> ConditionedPosterior:
    """Restore a saved posterior, checked against the model that it is for."""
    with _reading("a posterior", path):
        posterior = ConditionedPosterior.from_dict(described, tensors)
        maps, sketch = posterior.maps, posterior.maps.sketch
        fresh = ChosenMaps.of(model.backbone, maps.roles, sketch.dimension, sketch.seed, last=True)
        if unknown := sorted(set(described) - set(posterior.to_dict())):
            raise CheckpointError(f"unknown keys: {', '.join(unknown)}")
        if dict(fresh.sketch.shapes) != dict(sketch.shapes):
            raise CheckpointError("it is of another model's weights")
        return posterior


def write_tensors(path: str | Path, tensors: Tensors, header: Header) -> Path:
    """Write tensors and a JSON header atomically."""
    contiguous = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    full_header: dict[str, Any] = {"format": FORMAT, **header}
    full_header["checksum"] = _checksum(full_header, contiguous)
    data = to_safetensors(contiguous, metadata={"blips": json.dumps(full_header)})
    return write_atomically(path, data)


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and JSON header of a file written by `write_tensors`."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint {path}; check the path") from None
    except IsADirectoryError:
        example = Path(path) / "best.safetensors"
        raise CheckpointError(f"{path} is a folder; give a model file, such as {example}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}") from None
    if data[:2] in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05"):
        raise CheckpointError(
            f"{path} is a pickle (torch.save), which can run code when it is loaded; blips reads "
            "safetensors only. Convert it where you trust it, and write it with blips.save"
        )
    try:
        tensors = parse_safetensors(data)
        length = int.from_bytes(data[:8], "little")  # as safetensors begin
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        header = json.loads(metadata.get("blips", "null"))
    except (SafetensorError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by blips ({FORMAT}); use blips.save")
    if header.get("checksum") != _checksum(header, tensors):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit; restore a copy")
    return tensors, header


def _checksum(header: Header, tensors: Tensors) -> str:
    """Compute the SHA-256 of the header (sorted JSON), and of names, types, shapes and data."""
    described = {key: value for key, value in header.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name in sorted(tensors):
        flat = tensors[name].contiguous().reshape(-1)
        digest.update(f"{name}:{flat.dtype}:{tuple(tensors[name].shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
