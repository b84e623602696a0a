"""Configuration: strict schemas, files and `a.b=value` overrides merged left to right.

Unknown keys are refused with the nearest valid one. Every field has a default but the data.
"""

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blips.errors import ConfigError

EnergyUnit = Literal["eV", "meV", "kcal/mol", "kJ/mol", "Hartree", "Ry"]
LengthUnit = Literal["A", "Angstrom", "Bohr", "nm"]
AtomEnergies = Literal["fit", "none"] | dict[str, float]


class Section(BaseModel):
    """A part of the configuration; refuses keys that it does not know, infinity and NaN."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)


def setting(default: Any, about: str, **limits: Any) -> Any:
    """Make a field with a default, a description for people, and limits as pydantic has them."""
    return Field(default=default, description=about, **limits)


class BayesConfig(Section):
    """How the backbone becomes Bayesian; the arguments of `bayesianize`."""

    enabled: bool = setting(True, "False trains the plain backbone")
    prior_dropout: float | None = setting(None, "0.5; for released weights 0.01", gt=0, lt=1)
    bounds: tuple[float, float] | None = setting(None, "[1e-5, 4]; released: [1e-5, 0.11]")
    initial: float | None = setting(None, "coefficient at the start", gt=0)
    estimator: Literal["auto", "local", "flipout"] = "auto"
    exclude: list[str] = setting([], "patterns of maps that stay plain")
    encoder: dict[str, Any] = setting({}, "settings of the inference network")


class ModelConfig(Section):
    """The backbone and its posterior."""

    backbone: str = setting("painn", "or a released model, such as chgnet")
    hyperparameters: dict[str, Any] = setting({}, "of the backbone: cutoff (A), features, ...")
    pretrained: bool = setting(True, "released models start as released")
    weights: str | None = setting(None, "file of a released model's weights")
    trust: bool = setting(False, "let that file run code as it is read")
    bayes: BayesConfig = BayesConfig()


class LabelsConfig(Section):
    """Where the labels are in the files, and in which units."""

    energy_key: str = setting("energy", "its name; REF_energy is found, too")
    forces_key: str = setting("forces", "their name")
    stress_key: str = setting("stress", "its name")
    energy_unit: EnergyUnit = setting("eV", "of energies, and in forces and stress")
    length_unit: LengthUnit = setting("A", "in forces and stress; positions are in A")


class DataConfig(Section):
    """Structures to train and validate on."""

    train: str | None = setting(None, "any file that ASE reads")
    valid: str | float = setting(0.1, "file, or fraction to set aside")
    replay: str | None = setting(None, "file of a second set, not to forget")
    group_key: str | None = setting(None, "split whole groups by this info key")
    labels: LabelsConfig = LabelsConfig()
    reference_energies: AtomEnergies = setting(
        "fit", "of single atoms, eV: fit, none, or {H: -13.6, ...}"
    )
    stream: bool = setting(False, "read structures from disk as they are needed")


class WeightsConfig(Section):
    """Weights of the quantities in the data loss; zero leaves a quantity out.

    Targets of other names, which only your own data sets have, count with weight 1.
    """

    energy: float = setting(0.1, "of energies", ge=0)
    forces: float = setting(1.0, "of force components", ge=0)
    stress: float = setting(0.0, "of stresses", ge=0)


class ScheduleConfig(Section):
    """Learning rate over time."""

    kind: Literal["constant", "plateau", "cosine"] = "cosine"
    factor: float = setting(0.5, "plateau: multiply by this", gt=0, lt=1)
    patience: int = setting(30, "plateau: epochs without improvement", ge=0)
    min_lr: float = setting(0.0, "never below this", ge=0)
    warmup: float = setting(0.0, "fraction of all steps, linear", ge=0, lt=1)


class TrainingConfig(Section):
    """The optimisation: loss + kl_weight * KL."""

    epochs: int = setting(300, "passes over the training structures", ge=1)
    batch_size: int | None = setting(None, "structures in a step; default: 2 to 8", ge=1)
    loss: Literal["mae", "mse", "huber", "conditional_huber", "nll", "crps"] = "mae"
    huber_delta: float = setting(0.01, "where huber becomes linear", gt=0)
    loss_unit: EnergyUnit = setting("eV", "energy unit of the loss; lambda refers to it")
    energy_per_atom: bool = setting(False, "divide energy errors by N")
    weights: WeightsConfig = WeightsConfig()
    noise: bool = setting(False, "train with sampled weights and the KL, the paper's BLIP")
    condition: bool = setting(True, "condition the readout on the training data at the end")
    samples: int = setting(4, "of the nll and crps losses", ge=2)
    kl_weight: float = setting(1.0, "lambda", ge=0)
    kl_reduction: Literal["mean", "elbo"] = setting(
        "mean", "KL of a row, or of all weights over the number of data"
    )
    kl_warmup_epochs: int = setting(0, "epochs until lambda is full", ge=0)
    anchor_weight: float = setting(0.0, "keeps weights near those at the start", ge=0)
    replay_weight: float = setting(1.0, "of the loss on data.replay, in every step", ge=0)
    freeze_backbone: bool = setting(False, "train the inference network, leave the means")
    optimizer: Literal["adam", "adamw"] = "adam"
    lr: float = setting(1e-3, "learning rate", gt=0)
    encoder_lr: float | None = setting(None, "inference network's", gt=0)
    weight_decay: float = setting(0.0, "of the optimizer", ge=0)
    schedule: ScheduleConfig = ScheduleConfig()
    clip_norm: float | None = setting(None, "largest gradient norm", gt=0)
    ema_decay: float | None = setting(None, "of averaged weights, such as 0.99", gt=0, lt=1)
    early_stop_patience: int | None = setting(None, "epochs without improvement, then end", ge=1)
    checkpoint_every: int = setting(1, "epochs between checkpoints", ge=1)
    dtype: Literal["float32", "float64"] = "float32"
    accelerator: str = setting("auto", "cpu, cuda, mps, or what there is")
    devices: int = setting(1, "of a node", ge=1)
    nodes: int = setting(1, "machines", ge=1)
    strategy: str = setting("auto", "of Lightning Fabric, such as ddp")
    threads: int | None = setting(None, "CPU threads; default: torch's", ge=1)
    tensorboard: bool = setting(True, "also write logs for TensorBoard")


class RunConfig(Section):
    """Everything that `blips train` needs."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    seed: int = setting(0, "the same seed gives the same model", ge=0)
    folder: str = setting("runs/blips", "where everything goes")


Source = str | Path | Mapping[str, Any] | BaseModel
Sources = Source | Sequence[Source]
Schema = TypeVar("Schema", bound=BaseModel)


def load_config(*sources: Sources) -> RunConfig:
    """Merge files (YAML or JSON), mappings, overrides such as "training.epochs=50", and lists."""
    return load_as(RunConfig, *sources)


def load_as(schema: type[Schema], *sources: Sources) -> Schema:
    """Load a configuration as `load_config` does, for another schema."""
    try:
        return schema.model_validate(merge_sources(*sources))
    except ValidationError as error:
        raise ConfigError(_explain(error, schema)) from None


def merge_sources(*sources: Sources) -> dict[str, Any]:
    """Merge files, mappings and overrides, left to right, without validation."""
    return reduce(_merge, map(_read, sources), {})


def is_override(source: Source) -> bool:
    """Return whether this is `a.b=value` and no file."""
    return isinstance(source, str) and "=" in source and not os.path.exists(source)


def dump_config(config: BaseModel) -> str:
    """Write the resolved configuration as YAML, which `load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def different_settings(first: Any, second: Any, prefix: str = "") -> set[str]:
    """Return the names, such as "training.lr", of values in which two nested settings differ."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return set() if first == second else {prefix}
    found: set[str] = set()
    for key in first.keys() | second.keys():
        name = f"{prefix}.{key}" if prefix else key
        found |= different_settings(first.get(key), second.get(key), name)
    return found


def _read(source: Sources) -> dict[str, Any]:
    if isinstance(source, BaseModel):
        return source.model_dump(mode="json", exclude_unset=True)
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, str) and is_override(source):
        return _override(source)
    return _read_file(Path(source)) if isinstance(source, str | Path) else merge_sources(*source)


def _override(text: str) -> dict[str, Any]:
    key, _, value = text.partition("=")
    try:
        parsed: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"cannot read the value of {text!r}: {error}") from None
    for part in reversed(key.strip().split(".")):
        parsed = {part: parsed}
    return parsed


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}; check the path") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give a YAML or JSON file, or a.b=value") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"{path} holds {type(content).__name__}, expected a mapping of sections")
    return content or {}


def _merge(base: Any, update: Any) -> Any:
    """Replace a value, but of mappings only what the update names."""
    if not (isinstance(base, Mapping) and isinstance(update, Mapping)):
        return update
    return {**base, **{key: _merge(base.get(key), value) for key, value in update.items()}}


def _explain(error: ValidationError, schema: type[BaseModel]) -> str:
    """Explain each problem in one line, with the nearest valid key for unknown ones."""
    lines = []
    for problem in error.errors():
        location = [str(part) for part in problem["loc"]]
        where = ".".join(location)
        if problem["type"] == "extra_forbidden":
            section: Any = schema
            for part in location[:-1]:
                section = section.model_fields[part].annotation
            known = list(section.model_fields)
            nearest = difflib.get_close_matches(location[-1], known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
            lines.append(f"unknown key {where!r}; {hint}")
        elif not location:  # a rule about several keys
            lines.append(problem["msg"].removeprefix("Value error, "))
        else:
            lines.append(f"{where}: {problem['msg']}, got {problem['input']!r}")
    return "invalid configuration:\n  " + "\n  ".join(lines)
