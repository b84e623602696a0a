"""The prior beyond the data: a KL on displaced structures, on top of the paper's objective.

    data loss of samples + lambda * KL + mu * KL'

KL is taken on the training structures, where the data loss holds the posterior narrow; KL' on
displaced copies of them, where no label speaks. There the posterior is pulled to the prior, so that
it widens with the distance from the data instead of being whatever the inference network
extrapolates to. Conditioning on the data does better, without training (`blips.potential`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from blips.bayes.noise import seeded_generator
from blips.data.dataset import Batch
from blips.data.graph import Graph
from blips.potential import BayesianPotential
from blips.train.objective import LossTerms, NoiseKey, Objective

AnyGraph = TypeVar("AnyGraph", bound=Graph)


class BeyondObjective(Objective):
    """The paper's objective and mu * KL'.

    Args:
        weight: mu.
        displacement: largest standard deviation of the displacements, A.
    """

    def __init__(
        self, *arguments: Any, weight: float, displacement: float = 0.5, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.weight, self.displacement = weight, displacement

    def forward(
        self, batch: Batch, noise_key: NoiseKey, kl_scale: float, replay: Batch | None = None
    ) -> LossTerms:
        """Compute the loss of one training step."""
        terms = super().forward(batch, noise_key, kl_scale, replay)
        if not isinstance(self.model, BayesianPotential):
            return terms
        device = batch.graph.positions.device
        generator = seeded_generator(*noise_key, "beyond", device=device)
        beyond = displaced(batch.graph, self.displacement, generator)
        kl = self.kl(self.model, self.model.coefficients(beyond))
        parts = {**terms.parts, "kl_beyond": float(kl.detach())}
        return LossTerms(terms.total + self.weight * kl_scale * kl, parts)


def displaced(graph: AnyGraph, largest_std: float, generator: torch.Generator) -> AnyGraph:
    """Displace every coordinate by N(0, s^2), s uniform up to `largest_std` (A) by structure.

    Neighbour lists are kept.
    """
    positions = graph.positions.detach()
    options = {"generator": generator, "device": positions.device, "dtype": positions.dtype}
    std = largest_std * torch.rand(graph.num_structures, **options)  # [S]
    move = torch.randn(positions.shape, **options) * std[graph.structure][:, None]  # [N, 3]
    return replace(graph, positions=positions + move)


def split_settings(
    training: Mapping[str, Any],
) -> tuple[dict[str, Any], Callable[..., Objective] | None]:
    """Return settings of `blips.fit` without those of the prior beyond the data, and its objective.

    These are `beyond_weight` (mu) and `beyond_displacement` (A).
    """
    settings = dict(training)
    weight = settings.pop("beyond_weight", 0.0)
    displacement = settings.pop("beyond_displacement", 0.5)
    if weight == 0:
        return settings, None
    return settings, partial(BeyondObjective, weight=weight, displacement=displacement)
