"""One readable training loop; devices, precision and processes are Lightning Fabric's.

The shuffle and the noise of a step are functions of (seed, epoch, step), so no random state has
to be stored: a run continued from last.safetensors takes the same steps as one that was never
interrupted.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from lightning_fabric import Fabric
from torch import Tensor

from blips.bayes.noise import seeded_generator
from blips.config import RunConfig, TrainingConfig
from blips.data.dataset import Batch, TrainingData
from blips.errors import BlipsError, CheckpointError, ConfigError
from blips.potential import BayesianPotential
from blips.progress import retitle, track
from blips.train import checkpoint
from blips.train.loss import Anchor
from blips.train.objective import Model, Objective
from blips.train.optim import MovingAverage, Schedule, make_optimizer
from blips.train.run import Progress, RunFolder

SMALLEST_BATCH, LARGEST_BATCH, STEPS_PER_EPOCH = 2, 8, 50  # where no size is given


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
        replay: TrainingData | None = None,
        make_objective: Callable[..., Objective] = Objective,
    ) -> None:
        self.settings = settings = config.training
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.seed, self.folder = config.seed, folder
        self.train_data, self.valid_data = train, valid
        self.replay_data = replay if settings.replay_weight > 0 else None
        self.fabric = _fabric(settings, folder)
        self.fabric.launch()
        self.model = model.to(checkpoint.DTYPES[settings.dtype])
        self._frozen = _frozen_parameters(model, settings)
        objective = make_objective(self.model, settings, num_data=len(train))
        optimizer = make_optimizer(self.model, settings)
        self.objective, self.optimizer = self.fabric.setup(objective, optimizer)
        self.batch_size = settings.batch_size or default_batch_size(len(train))
        # the same number of steps on every process
        steps = math.ceil(len(train) / (self.batch_size * self.fabric.world_size))
        self.schedule = Schedule(self.optimizer, settings, settings.epochs * steps)
        self.average = MovingAverage(self.model, settings.ema_decay)
        anchor = objective.anchor = Anchor(self.model) if settings.anchor_weight > 0 else None
        self._kept: dict[str, dict[str, Tensor]] = {  # beside the model, for a resumption
            "average": self.average.values,
            "anchor": anchor.start if anchor else {},
        }
        self.progress = Progress()

    def resume(self) -> None:
        """Continue from the folder's last state, if there is one."""
        path = self.folder.last
        if not path.exists():
            return
        tensors, header = checkpoint.read_tensors(path)
        if "optimizer" not in header:
            raise CheckpointError(f"{path} is no training state; resume from a run's folder")
        checkpoint.restore(self.model, checkpoint.under("model.", tensors), path)
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in checkpoint.under("optimizer.", tensors).items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        for group, lr in zip(groups, header["optimizer"]["lr"], strict=True):
            group["lr"] = lr
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.schedule.restore(header["schedule"])
        for part, kept in self._kept.items():
            for name, tensor in kept.items():
                tensor.copy_(tensors[f"{part}.{name}"])
        self.progress = Progress(**header["progress"])

    def _save(self) -> None:
        """Write everything that `resume` needs, atomically."""
        optimizer = self.optimizer.state_dict()
        states = {f"{i}.{k}": v for i, of in optimizer["state"].items() for k, v in of.items()}
        parts = {"model": self.model.state_dict(), "optimizer": states, **self._kept}
        header = {
            "model": checkpoint.describe(self.model),
            "optimizer": {"lr": [group["lr"] for group in optimizer["param_groups"]]},
            "schedule": self.schedule.state(),
            "progress": vars(self.progress),
        }
        tensors = {f"{part}.{k}": v for part, group in parts.items() for k, v in group.items()}
        checkpoint.write_tensors(self.folder.last, tensors, header)

    def run(self) -> Progress:
        """Train until the last epoch or the early stop; return the history."""
        try:
            epochs = range(self.progress.epoch + 1, self.settings.epochs + 1)
            for epoch in track(epochs, "training", len(epochs)):
                if self._should_stop():
                    break
                row = {"epoch": epoch, "lr": self.optimizer.param_groups[0]["lr"]}
                row |= {f"train_{k}": v for k, v in self._train_epoch(epoch).items()}
                row |= {f"valid_{k}": v for k, v in self._validate().items()}
                self.schedule.after_epoch(row["valid_loss"])
                self._finish_epoch(epoch, row)
        finally:
            for parameter in self._frozen:
                parameter.requires_grad_(True)
        return self.progress

    def _train_epoch(self, epoch: int) -> dict[str, float]:
        self.objective.train()
        settings, seen = self.settings, list[tuple[dict[str, float], int]]()
        kl_scale = min(1.0, epoch / max(1, settings.kl_warmup_epochs))
        order = _shuffled(self.train_data, "shuffle", self.seed, epoch)
        surplus = -len(order) % self.fabric.world_size  # every process takes as many steps
        order = [*order, *order[:surplus]][self.fabric.global_rank :: self.fabric.world_size]
        for step, batch in enumerate(self._batches(self.train_data, order, self.batch_size)):
            key = (self.seed, epoch, step, self.fabric.global_rank)
            replay, more = None, self.replay_data
            if more is not None:  # structures that are a function of (seed, epoch, step)
                replay = next(self._batches(more, _shuffled(more, "replay", *key), self.batch_size))
            self.optimizer.zero_grad()
            terms = self.objective(batch, ("train", *key), kl_scale, replay)
            if not math.isfinite(terms.parts["loss"]):
                self._stop_non_finite(epoch, batch, self.train_data)
            if more and replay and not math.isfinite(terms.parts["replay"]):
                self._stop_non_finite(epoch, replay, more)
            self.fabric.backward(terms.total)
            if (norm := settings.clip_norm) is not None:
                self.fabric.clip_gradients(self.objective, self.optimizer, max_norm=norm)
            self.optimizer.step()
            self.schedule.after_step()
            self.average.update()
            seen.append((terms.parts, len(batch.indices)))
            self._show(terms.parts)
        means = _means(seen)
        if self.fabric.world_size == 1:
            return means
        # over all processes, each of which saw as many structures
        values = torch.tensor(list(means.values()), dtype=torch.float64, device=self.fabric.device)
        reduced = self.fabric.all_reduce(values, reduce_op="mean")
        return dict(zip(means, torch.as_tensor(reduced).tolist(), strict=True))

    def _validate(self) -> dict[str, float]:
        """Compute the validation loss, of the averaged weights where there are any."""
        self.objective.eval()
        objective: Any = self.objective.module
        size = self.settings.batch_size or LARGEST_BATCH
        batches = self._batches(self.valid_data, range(len(self.valid_data)), size)
        with self.average.applied():
            return _means([(objective.evaluate(b, self.seed), len(b.indices)) for b in batches])

    def _finish_epoch(self, epoch: int, row: dict[str, float]) -> None:
        self.progress.epoch = epoch
        self.progress.history.append(row)
        improved = row["valid_loss"] < self.progress.best_loss
        if improved:
            self.progress.best_loss, self.progress.best_epoch = row["valid_loss"], epoch
        if self.fabric.is_global_zero:
            if improved:
                with self.average.applied():
                    checkpoint.write_model(self.folder.best, self.model)
            last_epoch = epoch == self.settings.epochs or self._should_stop()
            if epoch % self.settings.checkpoint_every == 0 or last_epoch:
                self._save()
                self.folder.write_history(self.progress.history)
        self.fabric.log_dict({k: v for k, v in row.items() if k != "epoch"}, step=epoch)
        self.fabric.barrier()

    def _show(self, parts: dict[str, float]) -> None:
        """Show the terms of a step, and the best epoch so far, beside the bar."""
        names = {"coef_edge": "α", "coef_node": "β"}  # noqa: RUF001 - the method's own symbols
        shown = [f"{names.get(name, name)} {value:.3g}" for name, value in parts.items()]
        if self.progress.history:
            shown.append(f"best valid {self.progress}")
        retitle("training  " + "  ".join(shown))

    def _should_stop(self) -> bool:
        patience = self.settings.early_stop_patience
        waited = self.progress.epoch - self.progress.best_epoch
        return patience is not None and waited >= patience

    def _batches(self, data: TrainingData, order: Sequence[int], size: int) -> Iterator[Batch]:
        for first in range(0, len(order), size):
            batch = data.batch(list(order[first : first + size]))
            yield batch.to(self.fabric.device, checkpoint.DTYPES[self.settings.dtype])

    def _stop_non_finite(self, epoch: int, batch: Batch, data: TrainingData) -> NoReturn:
        names = ", ".join(data.name_of(index) for index in batch.indices)
        raise NonFiniteLossError(
            f"the loss is not finite in epoch {epoch} on: {names}. Check their labels, or lower "
            f"training.lr; the last good state is {self.folder.last}"
        )


def default_batch_size(structures: int) -> int:
    """Return the largest batch of 2 to 8 with 50 steps an epoch: few structures need the steps."""
    return min(max(structures // STEPS_PER_EPOCH, SMALLEST_BATCH), LARGEST_BATCH)


def _shuffled(data: TrainingData, *key: int | str) -> list[int]:
    """Return the numbers of all structures in an order that is a function of the key."""
    return torch.randperm(len(data), generator=seeded_generator(*key)).tolist()


def _means(batches: Sequence[tuple[dict[str, float], int]]) -> dict[str, float]:
    """Return means over structures from means over batches and the batches' sizes."""
    sums: dict[str, float] = {}
    for parts, count in batches:
        for name, value in parts.items():
            sums[name] = sums.get(name, 0.0) + value * count
    total = sum(count for _, count in batches)
    return {name: value / max(1, total) for name, value in sums.items()}


def _frozen_parameters(model: Model, settings: TrainingConfig) -> list[torch.nn.Parameter]:
    """Switch off the training of what the loss does not use; the parameters that were on."""
    frozen = settings.freeze_backbone
    if not isinstance(model, BayesianPotential) or (settings.noise and not frozen):
        return []
    unused = model.backbone if frozen else model.encoder
    parameters = [parameter for parameter in unused.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    return parameters


def _fabric(settings: TrainingConfig, folder: RunFolder) -> Fabric:
    """Set up devices and processes as configured; raise an error where there are none such."""
    loggers = list[Any]()
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
