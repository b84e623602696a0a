"""Models with a loss of their own, in place of `training.loss`."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from blips.backbones.derivatives import Derivatives
from blips.baselines import Baseline
from blips.config import TrainingConfig
from blips.data.dataset import Batch
from blips.train.objective import NoiseKey, Objective, total


class LikelihoodObjective(Objective):
    """The loss that the model has itself; the weights and units are those of the configuration."""

    def training_terms(
        self, batch: Batch, noise_key: NoiseKey
    ) -> tuple[dict[str, Tensor], Mapping[str, Tensor]]:
        """Compute the loss of a batch by quantity; there are no coefficients."""
        return self._terms(batch, create_graph=True), {}

    @torch.no_grad()
    def evaluate(self, batch: Batch, seed: int = 0) -> dict[str, float]:
        """Compute the terms on validation data."""
        return total(self._terms(batch, create_graph=False)).parts

    def _terms(self, batch: Batch, *, create_graph: bool) -> dict[str, Tensor]:
        assert isinstance(self.model, Likelihood)
        derivatives = self.derivatives(batch, create_graph=create_graph)
        return self.model.loss_terms(batch, self.config, derivatives)


class Likelihood(Baseline):
    """A model with a loss of its own: `training.loss` is not used, weights and units are."""

    objective: ClassVar = LikelihoodObjective

    def loss_terms(
        self, batch: Batch, config: TrainingConfig, derivatives: Derivatives
    ) -> dict[str, Tensor]:
        """Compute the weighted loss of every labelled quantity; their sum is minimised."""
        raise NotImplementedError
