"""`blips.load`: a model from a file, or a released one by its name."""

from pathlib import Path
from typing import Any

import torch

from blips.train import checkpoint
from blips.train.checkpoint import Saveable
from blips.train.released import is_released_name, load_released


def load(path: str | Path, device: str | torch.device = "cpu", **options: Any) -> Saveable:
    """Load a model: a file that `save` wrote, or a released model with its error bars.

    Args:
        path: a file, or a name such as "chgnet", see `blips.backbones.RELEASED`.
        device: where the model goes.
        options: of a released model, such as `weights` (a file of its package) and `trust`.
    """
    if is_released_name(path):
        return load_released(str(path), **options).to(device)
    if options:
        raise TypeError(f"{path} is no released model and takes no {', '.join(options)}")
    return checkpoint.load(path, device)
