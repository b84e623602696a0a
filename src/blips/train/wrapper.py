"""What training handles beside plain backbones and Bayesian potentials.

A wrapper is a backbone with something around it that is trained with it: noise of another kind
(`Stochastic`), or a likelihood of its own (`Likelihood`), as in `studies/baselines`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from blips.backbones.base import Backbone
from blips.backbones.derivatives import Derivatives
from blips.config import TrainingConfig
from blips.data.batch import Batch
from blips.data.graph import Graph
from blips.inference.sampling import Sample
from blips.prediction import Calibrator, Outputs


class Wrapper(nn.Module):
    """A backbone and what a method puts around it; `cls(backbone, **settings)` makes it again.

    Settings are JSON-able; a calibration belongs to a quantity ("energy", "forces", ...).
    """

    kind: ClassVar[str]  # name in checkpoints, of its own for every class that can be saved
    kinds: ClassVar[dict[str, type["Wrapper"]]] = {}

    def __init__(self, backbone: Backbone, settings: dict[str, Any]) -> None:
        super().__init__()
        self.backbone = backbone
        self.settings = settings
        self.calibration: dict[str, Calibrator] = {}

    @classmethod
    def rebuilt(cls, backbone: Backbone, settings: dict[str, Any]) -> "Wrapper":
        """Wrap a backbone that a file describes, for the weights in that file."""
        return cls(backbone, **settings)

    def __init_subclass__(cls) -> None:
        """Register the class for checkpoints."""
        super().__init_subclass__()
        if "kind" in cls.__dict__:
            Wrapper.kinds[cls.kind] = cls


class Stochastic(Wrapper):
    """A model that is random in training; the loss is that of its samples."""

    def forward(self, graph: Graph, **derivatives: Unpack[Derivatives]) -> Outputs:
        """Compute the outputs without noise."""
        raise NotImplementedError

    def sample(
        self,
        graph: Graph,
        generators: Sequence[torch.Generator],
        **derivatives: Unpack[Derivatives],
    ) -> Sample:
        """Draw K = len(generators) samples, replica-major."""
        raise NotImplementedError


class Likelihood(Wrapper):
    """A model with a loss of its own: `training.loss` is not used, weights and units are."""

    def loss_terms(
        self, batch: Batch, config: TrainingConfig, derivatives: Derivatives
    ) -> dict[str, Tensor]:
        """Compute the weighted loss of every labelled quantity; their sum is minimised."""
        raise NotImplementedError
