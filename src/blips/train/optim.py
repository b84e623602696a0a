"""Optimisers, learning-rate schedules and the moving average of weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from blips.config import TrainingConfig
from blips.potential import BayesianPotential


def make_optimizer(model: nn.Module, config: TrainingConfig) -> Optimizer:
    """Make Adam or AdamW, with a learning rate of its own for the inference network."""
    parts: list[tuple[nn.Module, float]] = [(model, config.lr)]
    if isinstance(model, BayesianPotential):
        parts = [(model.backbone, config.lr), (model.encoder, config.encoder_lr or config.lr)]
    trained = [([p for p in part.parameters() if p.requires_grad], lr) for part, lr in parts]
    groups = [{"params": parameters, "lr": lr} for parameters, lr in trained if parameters]
    kind = AdamW if config.optimizer == "adamw" else Adam
    return kind(groups, lr=config.lr, weight_decay=config.weight_decay)


class Schedule:
    """Learning rate by step (warm-up, cosine) and by validation loss (plateau, after warm-up)."""

    def __init__(self, optimizer: Optimizer, config: TrainingConfig, total_steps: int) -> None:
        schedule = config.schedule
        self.kind, self.total_steps = schedule.kind, total_steps
        self.warmup_steps = int(schedule.warmup * total_steps)
        self.least_factor = schedule.min_lr / config.lr
        self._by_step = LambdaLR(optimizer, self.factor)
        self._plateau: ReduceLROnPlateau | None = None
        if schedule.kind == "plateau":
            options = schedule.model_dump(include={"factor", "patience", "min_lr"})
            self._plateau = ReduceLROnPlateau(optimizer, **options)

    def factor(self, step: int) -> float:
        """Return the factor on the initial learning rate at a step."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "cosine":
            progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
            cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
            return self.least_factor + (1.0 - self.least_factor) * cosine
        return 1.0

    def after_step(self) -> None:
        """Advance warm-up and cosine; from the end of the warm-up on a plateau rules alone."""
        if self._plateau is None or self._by_step.last_epoch < self.warmup_steps:
            self._by_step.step()

    def after_epoch(self, valid_loss: float) -> None:
        """Advance the plateau."""
        if self._plateau is not None:
            self._plateau.step(valid_loss)

    def state(self) -> dict[str, float]:
        """Return the numbers that `restore` needs."""
        state: dict[str, float] = {"step": self._by_step.last_epoch}
        if self._plateau is not None:
            state |= {"best": self._plateau.best, "bad_epochs": self._plateau.num_bad_epochs}
        return state

    def restore(self, state: dict[str, float]) -> None:
        """Continue where `state` was taken; the learning rates are the optimiser's."""
        self._by_step.last_epoch = int(state["step"])
        if self._plateau is not None:
            self._plateau.best = state["best"]
            self._plateau.num_bad_epochs = int(state["bad_epochs"])


class MovingAverage:
    """Exponential moving average of a model's parameters; without a decay it averages nothing."""

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self.decay = decay
        self.parameters = {} if decay is None else dict(model.named_parameters())
        self.values = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Set average <- decay * average + (1 - decay) * parameter."""
        if self.decay is not None:
            for name, parameter in self.parameters.items():
                self.values[name].lerp_(parameter, 1.0 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Exchange the parameters with their averages within the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            kept = parameter.detach().clone()
            parameter.copy_(self.values[name])
            self.values[name].copy_(kept)
