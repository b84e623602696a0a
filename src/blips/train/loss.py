"""Data losses: how far outputs are from labels; and the penalty on how far weights have gone.

Point losses see one posterior sample; distribution losses (nll, crps) see K >= 2 samples and
compare their distribution with the label. Every loss is a mean over structures (energy, stress)
or over atoms and components (forces).
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from blips import keys
from blips.config import TrainingConfig
from blips.errors import ConfigError
from blips.units import ENERGY_UNITS

DISTRIBUTION_LOSSES = ("nll", "crps")
VAR_FLOOR = 1e-6  # of the sampled variance, in squared loss units


def data_loss(
    outputs: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    node_counts: Tensor,
    config: TrainingConfig,
) -> dict[str, Tensor]:
    """Compute the weighted loss of every labelled quantity; their sum is the data loss.

    Outputs are [K, rows, ...] by quantity, or replica-major [K * rows, ...], K = 1 for point
    losses; targets [rows, ...]; `node_counts` are the atoms of each structure, [S]. Quantities of
    the user's own have weight 1.
    """
    terms = {}
    for name, target in targets.items():
        weight = getattr(config.weights, name, 1.0)
        if weight > 0:
            factor = loss_factor(name, node_counts, config)
            samples = outputs[name].reshape(-1, *target.shape)
            terms[name] = weight * _distance(config)(samples * factor, target * factor).double()
    if not terms:
        raise ConfigError(
            f"nothing to train on: the data have {', '.join(targets) or 'no labels'}, all of "
            "weight 0 in training.weights"
        )
    return terms


def loss_factor(name: str, node_counts: Tensor, config: TrainingConfig) -> float | Tensor:
    """Return the factor from (eV, A) to the loss's unit; [S] for energies per atom."""
    if name not in (keys.ENERGY, keys.FORCES, keys.STRESS):
        return 1.0  # a quantity of the user's own, in a unit of its own
    unit = 1.0 / ENERGY_UNITS[config.loss_unit]
    per_atom = name == keys.ENERGY and config.energy_per_atom
    return unit / node_counts.double() if per_atom else unit


def _distance(config: TrainingConfig) -> Callable[[Tensor, Tensor], Tensor]:
    delta = config.huber_delta
    return {
        "mae": lambda samples, target: (samples - target).abs().mean(),
        "mse": lambda samples, target: (samples - target).square().mean(),
        "huber": lambda samples, target: huber(samples - target, delta).mean(),
        "conditional_huber": lambda samples, target: conditional_huber(samples, target, delta),
        "nll": sample_nll,
        "crps": sample_crps,
    }[config.loss]


def huber(error: Tensor, delta: float | Tensor) -> Tensor:
    """Compute e^2 / 2 within delta, delta (|e| - delta / 2) beyond."""
    size = error.abs()
    return torch.where(size <= delta, 0.5 * size.square(), delta * (size - 0.5 * delta))


def conditional_huber(samples: Tensor, target: Tensor, delta: float) -> Tensor:
    """Compute a Huber loss whose delta shrinks where the label itself is large.

    Vectors of norm above 1, 2 and 3 units get delta times 0.7, 0.4 and 0.1, so that the few atoms
    with huge forces do not rule the fit. Scalars are treated as plain Huber.
    """
    if target.ndim < 2:
        return huber(samples - target, delta).mean()
    norm = torch.linalg.vector_norm(target, dim=-1, keepdim=True)
    steps, edges = target.new_tensor([1.0, 0.7, 0.4, 0.1]), target.new_tensor([1.0, 2.0, 3.0])
    return huber(samples - target, delta * steps[torch.bucketize(norm, edges)]).mean()


def sample_nll(samples: Tensor, target: Tensor) -> Tensor:
    """Compute the negative log-likelihood of a Gaussian with the samples' moments, [K, ...]."""
    var = samples.var(dim=0, unbiased=True) + VAR_FLOOR
    squared_error = (samples.mean(dim=0) - target).square()
    return 0.5 * (torch.log(2.0 * math.pi * var) + squared_error / var).mean()


def sample_crps(samples: Tensor, target: Tensor) -> Tensor:
    """Compute the unbiased CRPS of K samples: mean |y_k - y| - 1/2 mean_(k != l) |y_k - y_l|."""
    count = samples.shape[0]
    ordered, _ = samples.sort(dim=0)
    ranks = torch.arange(count, dtype=samples.dtype, device=samples.device)
    weights = (2.0 * ranks - count + 1.0) / (count * (count - 1.0))  # sum of pair distances
    spread = (weights.reshape(-1, *[1] * (samples.ndim - 1)) * ordered).sum(dim=0)
    return ((samples - target).abs().mean(dim=0) - spread).mean()


class Anchor:
    """Penalty that keeps weights near those that training began with.

        A = 1/T sum_t  mean( (theta_t - theta0_t)^2 ) / mean( theta0_t^2 )

    over the T trained tensors of the backbone (a tensor that began as zeros counts without its
    denominator). Up to a constant, weight * A is the negative logarithm of a Gaussian prior
    N(theta0, s_t^2) whose width is the same fraction of the size of every tensor. It is on the
    means alone: the prior of the posterior's widths is another one.
    """

    def __init__(self, model: nn.Module) -> None:
        backbone = getattr(model, "backbone", model)  # not the inference network
        self.weights = {name: p for name, p in backbone.named_parameters() if p.requires_grad}
        self.start = {name: p.detach().clone() for name, p in self.weights.items()}
        if not self.start:
            raise ConfigError(
                "training.anchor_weight has nothing to hold, as no weights of the backbone are "
                "trained; leave it at 0 with training.freeze_backbone"
            )

    def penalty(self) -> Tensor:
        """Compute A of the model's present weights, one number."""
        distances: list[Tensor] = []
        for name, weight in self.weights.items():
            start = self.start[name]
            size = start.square().mean()
            distances.append((weight - start).square().mean() / torch.where(size > 0, size, 1.0))
        return torch.stack(distances).mean()
