"""Models with a second readout, which predicts how the labels scatter about the first.

What the second readout predicts for an atom becomes a `Distribution` of the label's error: one for
the energy of each structure, and one for all three force components of each atom.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self, Unpack

import torch
from torch import Tensor

from blips.backbones.base import Backbone, mlp
from blips.backbones.derivatives import Derivatives
from blips.backbones.hooks import inputs_of
from blips.baselines.base import Baseline
from blips.baselines.last_layer import readout_of
from blips.config import TrainingConfig
from blips.data.batch import Batch
from blips.data.graph import Graph
from blips.errors import ConfigError
from blips.prediction import Outputs, Prediction, point_prediction
from blips.train.loss import atom_counts, loss_factor
from blips.train.objective import plain_outputs
from blips.train.wrapper import Likelihood


class Distribution(Protocol):
    """Of label - prediction, with mean zero."""

    @property
    def aleatoric_var(self) -> Tensor:
        """Expected variance of the label."""
        ...

    @property
    def epistemic_var(self) -> Tensor | None:
        """Variance of the label's expectation, where the method has one."""
        ...

    def rescaled(self, factor: float | Tensor) -> Self:
        """Give the distribution of the error times `factor`."""
        ...

    def loss(self, error: Tensor) -> Tensor:
        """Compute what training minimises, elementwise."""
        ...


class SecondReadout(Likelihood, Baseline):
    """A potential whose second readout predicts distributions.

    Args:
        backbone: the plain potential.
        settings: of the subclass, for checkpoints.
        seed: of the second readout's initial weights.
    """

    numbers_per_atom: ClassVar[int]

    def __init__(self, backbone: Backbone, settings: dict[str, Any], seed: int = 0) -> None:
        super().__init__(backbone, settings)
        first = readout_of(backbone)[0]
        width = int(first.in_features)  # type: ignore[arg-type]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = mlp(width, width, self.numbers_per_atom)
        self.head.to(next(backbone.parameters()))

    def distributions(self, numbers: Tensor, graph: Graph) -> Mapping[str, Distribution]:
        """Make distributions of the numbers [N, P]: energy [S] and forces [N, 1], in eV, A."""
        raise NotImplementedError

    def evaluate(
        self, graph: Graph, **derivatives: Unpack[Derivatives]
    ) -> tuple[Outputs, Mapping[str, Distribution]]:
        """Compute outputs of the potential, and the distributions of their errors."""
        with inputs_of(readout_of(self.backbone)) as seen:
            outputs = plain_outputs(self.backbone, graph, **derivatives)
        return outputs, self.distributions(self.head(seen[-1]).double(), graph)

    def loss_terms(
        self, batch: Batch, config: TrainingConfig, derivatives: Derivatives
    ) -> dict[str, Tensor]:
        """Average the loss of the errors under their distributions, in the loss's unit."""
        outputs, distributions = self.evaluate(batch.graph, **derivatives)
        terms = {}
        for name, target in batch.targets.items():
            weight = getattr(config.weights, name)
            if weight == 0:
                continue
            if name not in distributions:
                raise ConfigError(
                    f"{type(self).__name__} has no distribution of the {name}; "
                    f"set training.weights.{name}=0"
                )
            factor = loss_factor(name, atom_counts(batch.graph), config)
            error = (target - outputs[name]).double() * factor
            terms[name] = weight * distributions[name].rescaled(factor).loss(error).mean()
        return terms

    def predict_graph(
        self, graph: Graph, *, seed: int = 0, forces: bool = True, stress: bool = False
    ) -> Prediction:
        """Predict with the std of the distributions."""
        with torch.no_grad():
            outputs, distributions = self.evaluate(graph, forces=forces, stress=stress)
        arrays = dict(outputs)
        for name, distribution in distributions.items():
            if name not in outputs:
                continue
            var = distribution.aleatoric_var.expand_as(outputs[name])
            arrays[f"{name}_aleatoric_std"] = var.sqrt()
            if distribution.epistemic_var is not None:
                arrays[f"{name}_std"] = distribution.epistemic_var.expand_as(outputs[name]).sqrt()
        return point_prediction(arrays, graph, method=self.kind)
