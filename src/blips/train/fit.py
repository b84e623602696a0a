"""`fit`: from structures, files or data sets to a trained potential in a run folder."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blips.backbones.base import Backbone, atomistic
from blips.config import RunConfig, Sources, TrainingConfig, load_config
from blips.data.dataset import StructureData, TrainingData
from blips.errors import BlipsError, ConfigError
from blips.potential import BayesianPotential
from blips.progress import progress_shown
from blips.train.checkpoint import read_tensors, restore, write_model
from blips.train.datasets import Data, DataSets
from blips.train.loop import Trainer
from blips.train.loss import DISTRIBUTION_LOSSES
from blips.train.objective import Model, Objective, Wrapper, backbone_of
from blips.train.references import settle_reference_energies
from blips.train.run import Progress, RunFolder

MOST_CONDITIONED, MOST_VALID = 2000, 200  # structures, a random choice of more


@dataclass(frozen=True)
class FitResult:
    """What a finished run leaves: its folder, the history of its epochs, and its data."""

    folder: Path
    progress: Progress
    train_data: TrainingData
    valid_data: TrainingData

    def __str__(self) -> str:
        """Summarise in one line."""
        return f"best validation loss {self.progress}, run in {self.folder}"


def fit(
    potential: Model,
    train: Data | None = None,
    *,
    valid: Data | float | None = None,
    replay: Data | None = None,
    config: Sources = (),
    folder: str | Path | None = None,
    resume: bool = False,
    display: bool = True,
    objective: Callable[..., Objective] | None = None,
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
            Default: that of the wrapper, if it has one.
        training: settings of the configuration's `training`, such as epochs, lr and batch_size;
            they count more than `config`.
    """
    settings = load_config(config, {"training": training})
    _check_noise(potential, settings.training)
    run = RunFolder(folder or settings.folder)
    with run.locked(), progress_shown() if display else nullcontext():
        run.start(settings, resume=resume)
        if not isinstance(potential, Backbone):  # error bars are of weights that will change
            potential.calibration = {}
        if isinstance(potential, BayesianPotential) and not settings.training.freeze_backbone:
            potential.posterior, potential.alignment = None, None
        data = DataSets(backbone_of(potential), settings, run, resume=resume)
        train_data, valid_data = data.main(train, valid)
        replay_data = data.replay(replay)
        minimised = objective or getattr(potential, "objective", None) or Objective
        trainer = Trainer(potential, train_data, valid_data, settings, run, replay_data, minimised)
        if resume:
            trainer.resume()
        progress = trainer.run()
        _finish(potential, train_data, valid_data, settings, run)
    return FitResult(run.path, progress, train_data, valid_data)


def _check_noise(potential: Model, training: TrainingConfig) -> None:
    """Refuse settings that need sampled weights where there are none, or no use of them."""
    distribution, frozen = training.loss in DISTRIBUTION_LOSSES, training.freeze_backbone
    sampled = isinstance(potential, Wrapper) and not frozen
    if isinstance(potential, BayesianPotential):
        sampled = training.noise
    if (distribution or frozen) and not sampled:
        needing = "freeze_backbone" if frozen else f"loss={training.loss}"
        raise ConfigError(
            f"training.{needing} needs sampled weights; set training.noise=true, for a potential "
            "that bayesianize (model.bayes) has made"
        )
    if frozen and not distribution:
        raise ConfigError(
            f"training.freeze_backbone with loss {training.loss!r} would only make the posterior "
            f"vanish; use training.loss={' or '.join(DISTRIBUTION_LOSSES)}"
        )


def _finish(
    potential: Model,
    train: TrainingData,
    valid: TrainingData,
    settings: RunConfig,
    run: RunFolder,
) -> None:
    """Take the best weights, settle their energies per element, condition them on their data."""
    if run.best.exists():
        tensors, header = read_tensors(run.best)
        restore(potential, tensors, run.best, header)
        if header.get("finished"):  # a run that had ended before, and found nothing better
            return
    if isinstance(train, StructureData) and isinstance(valid, StructureData):
        generator = np.random.default_rng(settings.seed)
        few, fewer = (
            [data.structures[k] for k in np.sort(generator.permutation(len(data))[:most]).tolist()]
            for data, most in ((train, MOST_CONDITIONED), (valid, MOST_VALID))
        )
        backbone = atomistic(backbone_of(potential))
        settle_reference_energies(backbone, [*few, *fewer], settings)
        if isinstance(potential, BayesianPotential) and settings.training.condition:
            try:
                seed, labels = settings.seed, valid.labels
                potential.condition(few, valid=fewer, labels=labels, seed=seed)
            except BlipsError as error:  # a finished training is worth more than its error bars
                text = f"the potential was not conditioned on its data: {error}"
                warnings.warn(text, stacklevel=3)
    if run.best.exists():
        write_model(run.best, potential, finished=True)
