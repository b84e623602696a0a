"""Configuration: strict schemas, files and `a.b=value` overrides merged left to right.

Unknown keys are refused with the nearest valid one. Every field has a default but the data.
"""

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blips.errors import ConfigError

EnergyUnit = Literal["eV", "meV", "kcal/mol", "kJ/mol", "Hartree", "Ry"]
LengthUnit = Literal["A", "Angstrom", "Bohr", "nm"]
Loss = Literal["mae", "mse", "huber", "conditional_huber", "nll", "crps"]


class Section(BaseModel):
    """A part of the configuration; refuses keys that it does not know, infinity and NaN."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)


class BayesConfig(Section):
    """How the backbone becomes Bayesian; the arguments of `bayesianize`."""

    enabled: bool = Field(default=True, description="False trains the plain backbone")
    prior_dropout: float | None = Field(
        default=None, gt=0, lt=1, description="0.5; for released weights 0.01"
    )
    bounds: tuple[float, float] | None = Field(
        default=None, description="[1e-5, 4]; for released weights [1e-5, 0.11]"
    )
    initial: float | None = Field(default=None, gt=0, description="coefficient at the start")
    estimator: Literal["auto", "local", "flipout"] = "auto"
    exclude: list[str] = Field(default=[], description="patterns of maps that stay plain")
    encoder: dict[str, Any] = Field(default={}, description="settings of the inference network")


class ModelConfig(Section):
    """The backbone and its posterior."""

    backbone: str = Field(default="painn", description="or a released model, such as chgnet")
    hyperparameters: dict[str, Any] = Field(
        default={}, description="of the backbone, such as cutoff (A) and features"
    )
    pretrained: bool = Field(default=True, description="released models start as released")
    weights: str | None = Field(default=None, description="file of a released model's weights")
    trust: bool = Field(default=False, description="let that file run code as it is read")
    bayes: BayesConfig = BayesConfig()


class LabelsConfig(Section):
    """Where the labels are in the files, and in which units."""

    energy_key: str = Field(default="energy", description="its name; REF_energy is found, too")
    forces_key: str = Field(default="forces", description="their name")
    stress_key: str = Field(default="stress", description="its name")
    energy_unit: EnergyUnit = Field(
        default="eV", description="of energies, and in forces and stress"
    )
    length_unit: LengthUnit = Field(
        default="A", description="in forces and stress; positions are in A"
    )


class DataConfig(Section):
    """Structures to train and validate on."""

    train: str | None = Field(default=None, description="any file that ASE reads")
    valid: str | float = Field(default=0.1, description="file, or fraction to set aside")
    replay: str | None = Field(default=None, description="file of a second set, not to forget")
    group_key: str | None = Field(default=None, description="split whole groups by this info key")
    labels: LabelsConfig = LabelsConfig()
    reference_energies: Literal["fit", "none"] | dict[str, float] = Field(
        default="fit", description="of single atoms, eV: fit, none, or {H: -13.6, ...}"
    )
    stream: bool = Field(default=False, description="read structures from disk as they are needed")


class WeightsConfig(Section):
    """Weights of the quantities in the data loss; zero leaves a quantity out.

    Targets of other names, which only your own data sets have, count with weight 1.
    """

    energy: float = Field(default=0.1, ge=0, description="of energies")
    forces: float = Field(default=1.0, ge=0, description="of force components")
    stress: float = Field(default=0.0, ge=0, description="of stresses")


class ScheduleConfig(Section):
    """Learning rate over time."""

    kind: Literal["constant", "plateau", "cosine"] = "cosine"
    factor: float = Field(default=0.5, gt=0, lt=1, description="plateau: multiply by this")
    patience: int = Field(default=30, ge=0, description="plateau: epochs without improvement")
    min_lr: float = Field(default=0.0, ge=0, description="never below this")
    warmup: float = Field(default=0.0, ge=0, lt=1, description="fraction of all steps, linear")


class TrainingConfig(Section):
    """The optimisation: loss + kl_weight * KL."""

    epochs: int = Field(default=300, ge=1, description="passes over the training structures")
    batch_size: int = Field(default=8, ge=1, description="structures in a step")
    loss: Loss = "mae"
    huber_delta: float = Field(default=0.01, gt=0, description="where huber becomes linear")
    loss_unit: EnergyUnit = Field(
        default="eV", description="energy unit of the loss; lambda refers to it"
    )
    energy_per_atom: bool = Field(default=False, description="divide energy errors by N")
    weights: WeightsConfig = WeightsConfig()
    noise: bool = Field(
        default=False, description="train with sampled weights and the KL, the paper's BLIP"
    )
    condition: bool = Field(
        default=True, description="condition the readout on the training data at the end"
    )
    samples: int = Field(default=4, ge=2, description="of the nll and crps losses")
    kl_weight: float = Field(default=1.0, ge=0, description="lambda")
    kl_reduction: Literal["mean", "elbo"] = Field(
        default="mean", description="KL of a row, or of all weights over the number of data"
    )
    kl_warmup_epochs: int = Field(default=0, ge=0, description="epochs until lambda is full")
    anchor_weight: float = Field(
        default=0.0, ge=0, description="keeps weights near those at the start"
    )
    replay_weight: float = Field(
        default=1.0, ge=0, description="of the loss on data.replay, which every step then has"
    )
    freeze_backbone: bool = Field(
        default=False, description="train the inference network alone; MAP predictions stay"
    )
    optimizer: Literal["adam", "adamw"] = "adam"
    lr: float = Field(default=1e-3, gt=0, description="learning rate")
    encoder_lr: float | None = Field(default=None, gt=0, description="inference network's")
    weight_decay: float = Field(default=0.0, ge=0, description="of the optimizer")
    schedule: ScheduleConfig = ScheduleConfig()
    clip_norm: float | None = Field(default=None, gt=0, description="largest gradient norm")
    ema_decay: float | None = Field(
        default=None, gt=0, lt=1, description="of a moving average of the weights, such as 0.99"
    )
    early_stop_patience: int | None = Field(
        default=None, ge=1, description="end after so many epochs without improvement"
    )
    checkpoint_every: int = Field(default=1, ge=1, description="epochs between checkpoints")
    dtype: Literal["float32", "float64"] = "float32"
    accelerator: str = Field(default="auto", description="cpu, cuda, mps, or what there is")
    devices: int = Field(default=1, ge=1, description="of a node")
    nodes: int = Field(default=1, ge=1, description="machines")
    strategy: str = Field(default="auto", description="of Lightning Fabric, such as ddp")
    threads: int | None = Field(default=None, ge=1, description="CPU threads; default: torch's")
    tensorboard: bool = Field(default=True, description="also write logs for TensorBoard")


class RunConfig(Section):
    """Everything that `blips train` needs."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    seed: int = Field(default=0, ge=0, description="the same seed gives the same model")
    folder: str = Field(default="runs/blips", description="where everything goes")


Source = str | Path | Mapping[str, Any] | BaseModel
Schema = TypeVar("Schema", bound=BaseModel)


def load_config(*sources: Source) -> RunConfig:
    """Merge files (YAML or JSON), mappings and overrides such as "training.epochs=50"; validate."""
    return load_as(RunConfig, *sources)


def load_as(schema: type[Schema], *sources: Source) -> Schema:
    """Load a configuration as `load_config` does, for another schema."""
    try:
        return schema.model_validate(merge_sources(*sources))
    except ValidationError as error:
        raise ConfigError(_explain(error, schema)) from None


def merge_sources(*sources: Source) -> dict[str, Any]:
    """Merge files, mappings and overrides, left to right, without validation."""
    merged: dict[str, Any] = {}
    for source in sources:
        merged = _merge(merged, _read(source))
    return merged


def is_override(source: Source) -> bool:
    """Return whether this is `a.b=value` and no file."""
    return isinstance(source, str) and "=" in source and not os.path.exists(source)


def dump_config(config: BaseModel) -> str:
    """Write the resolved configuration as YAML, which `load_config` reads back."""
    import yaml

    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def different_settings(first: Any, second: Any, prefix: str = "") -> set[str]:
    """Return the names, such as "training.lr", of values in which two nested settings differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        found: set[str] = set()
        for key in first.keys() | second.keys():
            name = f"{prefix}.{key}" if prefix else key
            found |= different_settings(first.get(key), second.get(key), name)
        return found
    return set() if first == second else {prefix}


def _read(source: Source) -> dict[str, Any]:
    if isinstance(source, BaseModel):
        return source.model_dump(mode="json", exclude_unset=True)
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, str) and is_override(source):
        return _override(source)
    return _read_file(Path(source))


def _override(text: str) -> dict[str, Any]:
    import yaml

    key, _, value = text.partition("=")
    try:
        parsed: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"cannot read the value of {text!r}: {error}") from None
    for part in reversed(key.strip().split(".")):
        parsed = {part: parsed}
    return parsed


def _read_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}; check the path") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give a YAML or JSON file, or a.b=value") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}, expected a mapping of sections")
    return content


def _merge(base: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in update.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _explain(error: ValidationError, schema: type[BaseModel]) -> str:
    """Explain each problem in one line, with the nearest valid key for unknown ones."""
    lines = []
    for problem in error.errors():
        location = [str(part) for part in problem["loc"]]
        where = ".".join(location)
        if problem["type"] == "extra_forbidden":
            known = list(_section_of(schema, location[:-1]).model_fields)
            nearest = difflib.get_close_matches(location[-1], known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
            lines.append(f"unknown key {where!r}; {hint}")
        elif not location:  # a rule about several keys
            lines.append(problem["msg"].removeprefix("Value error, "))
        else:
            lines.append(f"{where}: {problem['msg']}, got {problem['input']!r}")
    return "invalid configuration:\n  " + "\n  ".join(lines)


def _section_of(section: type[BaseModel], location: Sequence[str]) -> type[BaseModel]:
    for part in location:
        annotation = section.model_fields[part].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            section = annotation
    return section
