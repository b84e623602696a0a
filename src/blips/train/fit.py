"""`fit`: from structures, files or data sets to a trained potential in a run folder."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from ase import Atoms
from ase.data import atomic_numbers, chemical_symbols
from pydantic import BaseModel

from blips.backbones.base import AtomisticBackbone, Backbone, atomistic
from blips.backbones.foreign import ForeignBackbone
from blips.config import RunConfig, Source, load_config
from blips.data.dataset import AtomData, StreamedData, StructureData, TrainingData
from blips.data.labels import Labels
from blips.data.sanity import evenly_spaced, warn_of_labels
from blips.data.splits import Split, group_split, random_split
from blips.data.structures import check_structures, read_structures
from blips.errors import BlipsError, ConfigError, InputError
from blips.potential import BayesianPotential
from blips.train.checkpoint import (
    backbone_of,
    describe,
    read_tensors,
    restore,
    state_of,
    write_tensors,
)
from blips.train.display import TrainingDisplay, errors_of
from blips.train.loop import DTYPES, Trainer
from blips.train.loss import DISTRIBUTION_LOSSES
from blips.train.objective import Model, Objective
from blips.train.references import (
    moved,
    set_reference_energies,
    settle_reference_energies,
    unexplained_energies,
)
from blips.train.run import Progress, RunFolder

MOST_CONDITIONED, MOST_VALID = 2000, 200  # structures, a random choice of more
Data = str | Path | Sequence[Atoms] | TrainingData


@dataclass(frozen=True)
class FitResult:
    """What a finished run leaves: its folder, the history of its epochs, and its data."""

    folder: Path
    progress: Progress
    train_data: TrainingData
    valid_data: TrainingData

    def __str__(self) -> str:
        """Summarise in one line."""
        best = self.progress.history[self.progress.best_epoch - 1]
        loss = f"{self.progress.best_loss:.6g} {errors_of(best)}".rstrip()
        return f"best validation loss {loss}, run in {self.folder}"


def fit(
    potential: Model,
    train: Data | None = None,
    *,
    valid: Data | float | None = None,
    replay: Data | None = None,
    config: Source | Sequence[Source] = (),
    folder: str | Path | None = None,
    resume: bool = False,
    display: bool = True,
    objective: Callable[..., Objective] = Objective,
    **training: Any,
) -> FitResult:
    """Train `potential` in place; it ends with the weights of the best validation loss.

        blips.fit(potential, "train.extxyz", valid=0.1, epochs=200, lr=1e-3)

    At the end a Bayesian potential is conditioned on the training structures, with the validation
    structures for the scale of its error bars (`training.condition`).

    Args:
        potential: what `bayesianize` returns, a plain backbone, or a wrapper of one.
        train: a file that ASE reads, structures, or a data set; default: config's data.train.
        valid: the same, or a fraction of the training structures; default: config's data.valid.
        replay: a second set, against forgetting it (see `training.replay_weight`); default:
            config's data.replay.
        config: YAML file, mapping, overrides such as "training.epochs=50", or a list of these.
        folder: of the run; default: config's folder.
        resume: continue the run in that folder.
        display: show progress.
        objective: what a step minimises; a class like `Objective`, for a loss of your own.
        training: settings of the configuration's `training`, such as epochs, lr and batch_size;
            they count more than `config`.
    """
    settings = resolve_config(config)
    if training:
        settings = load_config(settings, {"training": training})
    _check_noise(potential, settings)
    run = RunFolder(folder or settings.folder)
    with run.locked():
        run.start(settings, resume=resume)
        _forget_error_bars(potential, settings)
        train_data, valid_data = _datasets(potential, train, valid, settings, run, resume=resume)
        replay_data = _replay(potential, replay, settings, run, resume=resume)
        shown = TrainingDisplay("training", settings.training.epochs) if display else None
        with shown or nullcontext():
            trainer = Trainer(
                potential, train_data, valid_data, settings, run, shown, replay_data, objective
            )
            if resume:
                trainer.resume()
            progress = trainer.run()
        _finish(potential, train_data, valid_data, settings, run)
    return FitResult(run.path, progress, train_data, valid_data)


def _check_noise(potential: Model, settings: RunConfig) -> None:
    """Refuse settings that need sampled weights where there are none."""
    training = settings.training
    needing = ["freeze_backbone"] if training.freeze_backbone else []
    if training.loss in DISTRIBUTION_LOSSES:
        needing.append(f"loss={training.loss}")
    if isinstance(potential, BayesianPotential):
        sampled = training.noise
    else:
        sampled = not isinstance(potential, Backbone)
    if needing and not sampled:
        raise ConfigError(
            f"training.{', training.'.join(needing)} needs sampled weights; set "
            "training.noise=true, for a potential that bayesianize (model.bayes) has made"
        )


def _forget_error_bars(potential: Model, settings: RunConfig) -> None:
    """Drop calibration, posterior and alignment: they are of weights that will change."""
    if not isinstance(potential, Backbone):
        potential.calibration = {}
    if isinstance(potential, BayesianPotential) and not settings.training.freeze_backbone:
        potential.posterior, potential.alignment = None, None


def _finish(
    potential: Model,
    train: TrainingData,
    valid: TrainingData,
    settings: RunConfig,
    run: RunFolder,
) -> None:
    """Take the best weights, settle their energies per element, condition them on their data."""
    header: dict[str, Any] = {}
    if run.best.exists():
        tensors, header = read_tensors(run.best)
        restore(potential, tensors, run.best)
    if isinstance(train, AtomData) and isinstance(valid, AtomData):
        generator = np.random.default_rng(settings.seed)
        few, fewer = (
            [data.atoms(k) for k in np.sort(generator.permutation(len(data))[:most]).tolist()]
            for data, most in ((train, MOST_CONDITIONED), (valid, MOST_VALID))
        )
        if not header.get("settled"):  # else a resumed run that had ended would do it again
            settle_reference_energies(
                atomistic(backbone_of(potential)), [*few, *fewer], settings, valid.labels
            )
        if isinstance(potential, BayesianPotential) and settings.training.condition:
            _condition(potential, few, fewer, valid.labels, settings.seed)
    if run.best.exists():
        header = {"model": describe(potential), "settled": True}
        write_tensors(run.best, state_of(potential), header)


def _condition(
    potential: BayesianPotential,
    train: Sequence[Atoms],
    valid: Sequence[Atoms],
    labels: Labels | None,
    seed: int,
) -> None:
    try:
        potential.condition(train, valid=valid, labels=labels, seed=seed)
    except BlipsError as error:  # a finished training is worth more than its error bars
        warnings.warn(f"the potential was not conditioned on its data: {error}", stacklevel=2)


def resolve_config(config: Source | Sequence[Source]) -> RunConfig:
    """Load the configuration that one source, or several merged left to right, describe."""
    one = isinstance(config, str | Path | Mapping | BaseModel)
    return load_config(*([config] if one else config))


def _datasets(
    potential: Model,
    train: Data | None,
    valid: Data | float | None,
    settings: RunConfig,
    run: RunFolder,
    *,
    resume: bool,
) -> tuple[TrainingData, TrainingData]:
    """Make training and validation sets, and set the model's reference energies.

    Data sets are taken as they are; their model keeps the reference energies that it has.
    """
    train = settings.data.train if train is None else train
    valid = settings.data.valid if valid is None else valid
    if train is None:
        raise ConfigError("no training data; give fit(..., train=...) or data.train in the config")
    if _is_data_set(train):
        if not _is_data_set(valid):
            raise InputError("a training data set needs a validation data set, not a file")
        if isinstance(train, AtomData):
            backbone_of(potential).labels = train.labels
        return train, valid
    if _is_data_set(valid):
        raise InputError("training structures need validation structures, not a data set")
    backbone = atomistic(backbone_of(potential))
    backbone.labels = _labels(settings)
    if settings.data.stream:
        if not (isinstance(train, str | Path) and isinstance(valid, str | Path)):
            raise ConfigError("data.stream needs files in data.train and data.valid")
        options = _options(settings)
        train_data = StreamedData(train, backbone.graph_of, **options)
        valid_data = StreamedData(valid, backbone.graph_of, **options)
    else:
        train_data, valid_data = _in_memory(backbone, train, valid, settings, run, resume=resume)
    judged = [train_data.atoms(k) for k in evenly_spaced(len(train_data))]
    warn_of_labels(judged, backbone.labels)
    set_reference_energies(backbone, train_data, settings)
    return train_data, valid_data


def _in_memory(
    backbone: AtomisticBackbone,
    train: Any,
    valid: Any,
    settings: RunConfig,
    run: RunFolder,
    *,
    resume: bool,
) -> tuple[StructureData, StructureData]:
    """Read training and validation structures, or set a fraction of the former aside."""
    structures, name = _structures(train, settings), _name(train, "training")
    if not isinstance(valid, float):
        others, their_name = _structures(valid, settings), _name(valid, "validation")
        first = _data(backbone, structures, settings, name)
        return first, _data(backbone, others, settings, their_name)
    split, path = _split(structures, valid, settings), run.path / "split.json"
    if resume and path.exists() and Split.load(path) != split:
        raise ConfigError(
            f"cannot resume {run.path}: the structures are not those that it began with, and "
            "would be split in another way; use the same ones or a new folder"
        )
    split.save(path)
    first = _data(backbone, structures, settings, name, split.train)
    return first, _data(backbone, structures, settings, name, split.valid)


def _replay(
    potential: Model, replay: Data | None, settings: RunConfig, run: RunFolder, *, resume: bool
) -> TrainingData | None:
    """Return the replay set; its energies are shifted to those of a released model.

    What was moved is in the folder: at a resumption the model may no longer be that of the start.
    """
    replay = settings.data.replay if replay is None else replay
    if replay is None or _is_data_set(replay):
        return replay
    backbone = atomistic(backbone_of(potential))
    structures, name = _structures(replay, settings), _name(replay, "replay")
    fits = settings.data.reference_energies == "fit" and "energy" in _quantities(settings)
    if not (fits and isinstance(backbone, ForeignBackbone)):
        return _data(backbone, structures, settings, name)
    path = run.path / "replay.json"
    if resume and path.exists():
        by_element = json.loads(path.read_text())
    else:
        shift = unexplained_energies(backbone, structures, _labels(settings)).by_number()
        by_element = {chemical_symbols[number]: energy for number, energy in shift.items()}
        run.write_json(path.name, by_element)
    shift = {atomic_numbers[symbol]: energy for symbol, energy in by_element.items()}
    structures = moved(structures, shift, _quantities(settings), _labels(settings))
    options = {**_options(settings), "labels": None}
    return StructureData(structures, backbone.graph_of, source=name, **options)


def _is_data_set(data: object) -> TypeGuard[TrainingData]:
    return hasattr(data, "batch") and hasattr(data, "name_of")


def _name(data: object, default: str) -> str:
    return str(data) if isinstance(data, str | Path) else f"{default} structures"


def _structures(data: Any, settings: RunConfig) -> list[Atoms]:
    labels = _labels(settings)
    if isinstance(data, str | Path):
        return check_structures(read_structures(data), data, labels=labels)
    return check_structures(data, labels=labels)


def _quantities(settings: RunConfig) -> tuple[str, ...]:
    weights = settings.training.weights
    return tuple(name for name in ("energy", "forces", "stress") if getattr(weights, name) > 0)


def _labels(settings: RunConfig) -> Labels:
    return Labels(**settings.data.labels.model_dump())


def _options(settings: RunConfig) -> dict[str, Any]:
    """Return the options of data sets."""
    dtype = DTYPES[settings.training.dtype]
    return {"quantities": _quantities(settings), "labels": _labels(settings), "dtype": dtype}


def _data(
    backbone: AtomisticBackbone,
    structures: Sequence[Atoms],
    settings: RunConfig,
    source: str,
    frames: Sequence[int] | None = None,
) -> StructureData:
    """Make a data set of these frames of the structures, or of all."""
    chosen = structures if frames is None else [structures[k] for k in frames]
    options = _options(settings)
    return StructureData(chosen, backbone.graph_of, source=source, frames=frames, **options)


def _split(structures: list[Atoms], fraction: float, settings: RunConfig) -> Split:
    """Set a fraction aside, at random or by whole groups."""
    fractions, key = [1.0 - fraction, fraction], settings.data.group_key
    if key is None:
        split = random_split(len(structures), fractions, settings.seed)
    else:
        for frame, atoms in enumerate(structures):
            if key not in atoms.info:
                raise InputError(
                    f"frame {frame} has no {key!r} in its info, which data.group_key is"
                )
        groups = [str(atoms.info[key]) for atoms in structures]
        split = group_split(groups, fractions, settings.seed)
    if not split.valid:
        raise ConfigError(
            f"data.valid={fraction:g} sets none of {len(structures)} structures aside to validate "
            "on; give a larger fraction, or other structures"
        )
    return split
