"""One readable training loop; devices, precision and processes are Lightning Fabric's."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import ase.io
import torch
from lightning_fabric import Fabric

from blips.bayes.noise import seeded_generator
from blips.config import RunConfig, TrainingConfig
from blips.data.dataset import AtomData, Batch, TrainingData
from blips.errors import BlipsError, ConfigError
from blips.potential import BayesianPotential
from blips.train.checkpoint import describe, state_of, write_tensors
from blips.train.display import TrainingDisplay
from blips.train.loss import DISTRIBUTION_LOSSES, Anchor
from blips.train.objective import Model, Objective
from blips.train.optim import MovingAverage, Schedule, make_optimizer
from blips.train.run import Progress, RunFolder, TrainingState

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class NonFiniteLossError(BlipsError):
    """The loss became NaN or infinite."""

    exit_code = 1


class Trainer:
    """Trains a model on labelled graphs and keeps everything in a run folder.

    Validation data choose the best checkpoint; every step also has a batch of a `replay` set.
    """

    def __init__(
        self,
        model: Model,
        train: TrainingData,
        valid: TrainingData,
        config: RunConfig,
        folder: RunFolder,
        display: TrainingDisplay | None = None,
        replay: TrainingData | None = None,
        make_objective: Callable[..., Objective] = Objective,
    ) -> None:
        settings = config.training
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.config, self.folder, self.display = config, folder, display
        self.train_data, self.valid_data, self.replay_data = train, valid, replay
        self.dtype = DTYPES[settings.dtype]
        self.fabric = _fabric(config, folder)
        self.fabric.launch()
        self.model = model.to(self.dtype)
        self._frozen = _frozen_parameters(model, settings)
        objective = make_objective(self.model, settings, num_data=len(train))
        self.objective, self.optimizer = self.fabric.setup(
            objective, make_optimizer(self.model, settings)
        )
        anchor = objective.anchor = Anchor(self.model) if settings.anchor_weight > 0 else None
        self.schedule = Schedule(self.optimizer, settings, settings.epochs * self.steps_per_epoch)
        decay = settings.ema_decay
        self.average = None if decay is None else MovingAverage(self.model, decay)
        self.state = TrainingState(self.model, self.optimizer, self.schedule, self.average, anchor)

    @property
    def progress(self) -> Progress:
        """Where the run is."""
        return self.state.progress

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of an epoch, the same on every process."""
        per_step = self.config.training.batch_size * self.fabric.world_size
        return max(1, math.ceil(len(self.train_data) / per_step))

    def resume(self) -> None:
        """Continue from the folder's last state, if there is one."""
        if self.folder.last.exists():
            self.state.restore(self.folder.last)

    def run(self) -> Progress:
        """Train until the last epoch or the early stop; return the history."""
        try:
            while self.progress.epoch < self.config.training.epochs and not self._should_stop():
                self._run_epoch(self.progress.epoch + 1)
        finally:
            for parameter in self._frozen:
                parameter.requires_grad_(True)
        return self.progress

    def _run_epoch(self, epoch: int) -> None:
        row = {"epoch": epoch, "lr": self.optimizer.param_groups[0]["lr"]}
        row |= {f"train_{k}": v for k, v in self._train_epoch(epoch).items()}
        row |= self._validate()
        self.schedule.after_epoch(row["valid_loss"])
        self._finish_epoch(epoch, row)

    def _train_epoch(self, epoch: int) -> dict[str, float]:
        self.objective.train()
        settings, totals = self.config.training, Totals()
        warmup = settings.kl_warmup_epochs
        kl_scale = 1.0 if warmup == 0 else min(1.0, epoch / warmup)
        for step, batch in enumerate(self._batches(self.train_data, epoch)):
            key = ("train", self.config.seed, epoch, step, self.fabric.global_rank)
            self.optimizer.zero_grad()
            replay = self._replay_batch(epoch, step)
            terms = self.objective(batch, key, kl_scale, replay)
            if not math.isfinite(terms.parts["loss"]):
                self._stop_non_finite(epoch, batch, self.train_data)
            if self.replay_data and replay and not math.isfinite(terms.parts["replay"]):
                self._stop_non_finite(epoch, replay, self.replay_data)
            self.fabric.backward(terms.total)
            if settings.clip_norm is not None:
                self.fabric.clip_gradients(
                    self.objective, self.optimizer, max_norm=settings.clip_norm
                )
            self.optimizer.step()
            self.schedule.after_step()
            if self.average is not None:
                self.average.update(self.model)
            totals.add(terms.parts, len(batch.indices))
            if self.display is not None:
                self.display.step(terms.parts)
        return self._over_processes(totals.means())

    def _over_processes(self, means: dict[str, float]) -> dict[str, float]:
        """Average over all processes, each of which saw as many structures."""
        if self.fabric.world_size == 1:
            return means
        values = torch.tensor(list(means.values()), dtype=torch.float64, device=self.fabric.device)
        reduced = self.fabric.all_reduce(values, reduce_op="mean")
        return dict(zip(means, torch.as_tensor(reduced).tolist(), strict=True))

    def _validate(self) -> dict[str, float]:
        """Compute the validation loss, of the averaged weights where there are any."""
        self.objective.eval()
        totals = Totals()
        with self._averaged():
            for batch in self._batches(self.valid_data, None):
                objective: Any = self.objective.module
                totals.add(objective.evaluate(batch, self.config.seed), len(batch.indices))
        return {f"valid_{k}": v for k, v in totals.means().items()}

    def _averaged(self) -> AbstractContextManager[None]:
        """Use the moving average of the weights, where there is one, within the block."""
        return nullcontext() if self.average is None else self.average.applied(self.model)

    def _finish_epoch(self, epoch: int, row: dict[str, float]) -> None:
        self.progress.epoch = epoch
        self.progress.history.append(row)
        improved = row["valid_loss"] < self.progress.best_loss
        if improved:
            self.progress.best_loss, self.progress.best_epoch = row["valid_loss"], epoch
        if self.fabric.is_global_zero:
            if improved:
                with self._averaged():
                    header = {"model": describe(self.model)}
                    write_tensors(self.folder.best, state_of(self.model), header)
            last_epoch = epoch == self.config.training.epochs or self._should_stop()
            if epoch % self.config.training.checkpoint_every == 0 or last_epoch:
                self.state.save(self.folder.last)
                self.folder.write_history(self.progress.history)
        self.fabric.log_dict({k: v for k, v in row.items() if k != "epoch"}, step=epoch)
        if self.display is not None:
            self.display.epoch(row)
        self.fabric.barrier()

    def _should_stop(self) -> bool:
        patience = self.config.training.early_stop_patience
        waited = self.progress.epoch - self.progress.best_epoch
        return patience is not None and waited >= patience

    def _batches(self, data: TrainingData, epoch: int | None) -> Iterator[Batch]:
        """Yield batches of this process: shuffled by (seed, epoch); in order if epoch is None."""
        size = self.config.training.batch_size
        if epoch is None:
            order = torch.arange(len(data))
        else:
            shuffle = seeded_generator("shuffle", self.config.seed, epoch)
            order = torch.randperm(len(data), generator=shuffle)
            surplus = -len(order) % self.fabric.world_size  # every process takes as many steps
            order = torch.cat([order, order[:surplus]])
            order = order[self.fabric.global_rank :: self.fabric.world_size]
        for first in range(0, len(order), size):
            batch = data.batch(order[first : first + size].tolist())
            yield batch.to(self.fabric.device, self.dtype)

    def _replay_batch(self, epoch: int, step: int) -> Batch | None:
        """Draw structures of the replay set, a function of (seed, epoch, step)."""
        data, weight = self.replay_data, self.config.training.replay_weight
        if data is None or weight == 0:
            return None
        shuffle = seeded_generator("replay", self.config.seed, epoch, step, self.fabric.global_rank)
        order = torch.randperm(len(data), generator=shuffle)
        batch = data.batch(order[: self.config.training.batch_size].tolist())
        return batch.to(self.fabric.device, self.dtype)

    def _stop_non_finite(self, epoch: int, batch: Batch, data: TrainingData) -> NoReturn:
        names = [data.name_of(index) for index in batch.indices]
        shown = ", ".join(names[:10]) + (" ..." if len(names) > 10 else "")
        written = ""
        if isinstance(data, AtomData):
            path = self.folder.path / "nonfinite.extxyz"
            ase.io.write(path, [data.atoms(index) for index in batch.indices])
            written = f" They were written to {path}."
        raise NonFiniteLossError(
            f"the loss is not finite in epoch {epoch} on: {shown}.{written} Check their labels, "
            f"or lower training.lr; the last good state is {self.folder.last}"
        )


class Totals:
    """Means over structures of the terms of many batches."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._count = 0

    def add(self, parts: dict[str, float], count: int) -> None:
        """Add the means of a batch of `count` structures."""
        self._count += count
        for name, value in parts.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * count

    def means(self) -> dict[str, float]:
        """Return the means over all structures so far."""
        return {name: total / max(1, self._count) for name, total in self._sums.items()}


def _frozen_parameters(model: Model, settings: TrainingConfig) -> list[torch.nn.Parameter]:
    """Switch off the training of what the loss does not use; the parameters that were on."""
    unused: torch.nn.Module | None = None
    if isinstance(model, BayesianPotential):
        unused = model.backbone if settings.freeze_backbone else model.encoder
    elif settings.freeze_backbone:
        raise ConfigError("training.freeze_backbone needs a Bayesian potential; see bayesianize")
    if settings.freeze_backbone and settings.loss not in DISTRIBUTION_LOSSES:
        raise ConfigError(
            f"training.freeze_backbone with loss {settings.loss!r} would only make the posterior "
            f"vanish; use training.loss={' or '.join(DISTRIBUTION_LOSSES)}"
        )
    if unused is None or (settings.noise and not settings.freeze_backbone):
        return []
    frozen = [parameter for parameter in unused.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return frozen


def _fabric(config: RunConfig, folder: RunFolder) -> Fabric:
    """Set up devices and processes as configured; raise an error where there are none such."""
    settings, loggers = config.training, list[Any]()
    if settings.tensorboard:
        from lightning_fabric.loggers.tensorboard import TensorBoardLogger

        loggers.append(TensorBoardLogger(root_dir=folder.path, name="tensorboard", version=""))
    try:
        return Fabric(
            accelerator=settings.accelerator,
            devices=settings.devices,
            num_nodes=settings.nodes,
            strategy=settings.strategy,
            loggers=loggers,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"training.accelerator={settings.accelerator}, devices={settings.devices}, "
            f"strategy={settings.strategy} cannot be used here: {error} "
            "accelerator=auto takes what there is"
        ) from None
