"""Anchor: a penalty that keeps weights near those that training began with.

    A = 1/T sum_t  mean( (theta_t - theta0_t)^2 ) / mean( theta0_t^2 )

over the T trained tensors of the backbone (a tensor that began as zeros counts without its
denominator). Up to a constant, weight * A is the negative logarithm of a Gaussian prior
N(theta0, s_t^2) whose width is the same fraction of the size of every tensor. The prior of the
posterior's widths is another one, and stays: this one is on the means alone.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from blips.errors import ConfigError


class Anchor:
    """Weights at the start of a training run, and how far a model has gone from them.

    Args:
        model: at the start of training, on its device.
    """

    def __init__(self, model: nn.Module) -> None:
        self.start = {name: p.detach().clone() for name, p in _trained(model)}
        if not self.start:
            raise ConfigError(
                "training.anchor_weight has nothing to hold, as no weights of the backbone are "
                "trained; leave it at 0 with training.freeze_backbone"
            )

    def penalty(self, model: nn.Module) -> Tensor:
        """A of the model's present weights, one number."""
        distances = [_distance(parameter, self.start[name]) for name, parameter in _trained(model)]
        return torch.stack(distances).mean()

    def restore(self, start: Mapping[str, Tensor]) -> None:
        """Take the start of the run that is resumed."""
        for name, tensor in self.start.items():
            tensor.copy_(start[name])


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that are trained and no others; the inference network has nothing to keep."""
    backbone = getattr(model, "backbone", model)
    return [(name, p) for name, p in backbone.named_parameters() if p.requires_grad]


def _distance(now: Tensor, start: Tensor) -> Tensor:
    size = start.square().mean()
    return (now - start).square().mean() / torch.where(size > 0, size, 1.0)
