"""The resumable state of a training run: weights, optimiser, schedule, history.

The shuffle and the noise of a step are functions of (seed, epoch, step), so no random state has
to be stored: a run continued from here takes the same steps as one that was never interrupted.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from blips.errors import CheckpointError
from blips.train.checkpoint import describe, read_tensors, restore, write_tensors
from blips.train.loss import Anchor
from blips.train.optim import MovingAverage, Schedule


@dataclass
class Progress:
    """Where a run is: finished epochs, best validation loss, one row per epoch."""

    epoch: int = 0
    best_loss: float = math.inf
    best_epoch: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


def save_state(
    path: Path,
    model: Any,
    optimizer: Optimizer,
    schedule: Schedule,
    average: MovingAverage | None,
    progress: Progress,
    anchor: Anchor | None = None,
) -> None:
    """Write everything that `restore_state` needs, atomically."""
    tensors: dict[str, Tensor] = {f"model.{k}": v for k, v in model.state_dict().items()}
    saved = optimizer.state_dict()
    scalars: dict[str, Any] = {}
    for index, entries in saved["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{key}"] = value
            else:
                scalars[f"{index}.{key}"] = value
    if average is not None:
        tensors |= {f"average.{k}": v for k, v in average.values.items()}
    if anchor is not None:
        tensors |= {f"anchor.{k}": v for k, v in anchor.start.items()}
    header = {
        "model": describe(model),
        "optimizer": {"scalars": scalars, "lr": [group["lr"] for group in saved["param_groups"]]},
        "schedule": schedule.state(),
        "progress": {**vars(progress), "best_loss": _json_float(progress.best_loss)},
    }
    write_tensors(path, tensors, header)


def restore_state(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: Schedule,
    average: MovingAverage | None,
    anchor: Anchor | None = None,
) -> Progress:
    """Restore a run to where `save_state` left it."""
    tensors, header = read_tensors(path)
    parts: dict[str, dict[str, Tensor]] = {
        part: {} for part in ("model", "optimizer", "average", "anchor")
    }
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part not in parts:
            raise CheckpointError(f"{path} is no training state; resume from a run's folder")
        parts[part][rest] = tensor
    restore(model, parts["model"], path)
    _restore_optimizer(optimizer, parts["optimizer"], header["optimizer"])
    schedule.restore(header["schedule"])
    if average is not None:
        average.values = parts["average"]
    if anchor is not None:
        anchor.restore(parts["anchor"])
    saved = dict(header["progress"])
    saved["best_loss"] = float(saved["best_loss"])
    return Progress(**saved)


def _restore_optimizer(
    optimizer: Optimizer, tensors: dict[str, Tensor], header: dict[str, Any]
) -> None:
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *header["scalars"].items()]:
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    for group, lr in zip(groups, header["lr"], strict=True):
        group["lr"] = lr
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _json_float(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
