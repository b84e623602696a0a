"""Shallow ensemble: one network, several last layers.

Kellner, Ceriotti, "Uncertainty quantification by direct propagation of shallow ensembles" (2024).
All members share everything up to the last-layer features f; member m has weights of its own,
and all are trained together on how well their distribution describes the label (NLL or CRPS).

    E_m = E_0 + sum_i (d_m - mean_k d_k) . f_i,    F_m = -dE_m/dr

E_0 is the backbone's own energy. The deviations from the mean of d sum to zero, so that the
mean of the members is the backbone itself, whatever its weights.
"""

from dataclasses import replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from blips import keys
from blips.backbones.base import Backbone
from blips.backbones.derivatives import Derivatives
from blips.config import TrainingConfig
from blips.data.dataset import Batch
from blips.data.graph import Graph
from blips.errors import ConfigError, InputError
from blips.inference.monte_carlo import monte_carlo
from blips.prediction import Outputs, Prediction
from blips.train.loss import data_loss
from studies.baselines.last_layer import energy_scale, gradient_of_each, last_layer, readout_of
from studies.baselines.likelihood import Likelihood

Loss = Literal["nll", "crps"]


class ShallowEnsemble(Likelihood):
    """M last layers on one backbone.

    Args:
        backbone: the plain potential; it stays the mean of the members.
        heads: M, at least 2.
        loss: "nll" (Gaussian with the members' mean and variance) or "crps" (of the members).
        seed: of the deviations' initial values.
    """

    kind: ClassVar = "shallow"

    def __init__(
        self, backbone: Backbone, heads: int = 16, loss: Loss = "crps", seed: int = 0
    ) -> None:
        if heads < 2:
            raise InputError(f"heads={heads}: a standard deviation needs at least 2")
        if loss not in get_args(Loss):
            raise InputError(f"unknown loss {loss!r}; use one of {', '.join(get_args(Loss))}")
        super().__init__(backbone, {"heads": heads, "loss": loss, "seed": seed})
        self.loss = loss
        width = int(readout_of(backbone)[-1].in_features)  # type: ignore[arg-type]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.heads = nn.Linear(width, heads)
        self.heads.to(next(backbone.parameters()))

    def members(self, graph: Graph, *, forces: bool = True, create_graph: bool = False) -> Outputs:
        """Compute energy [M, S], energies [M, N] and forces [M, N, 3] of every member."""
        outputs: Outputs = {}

        def total_energies(graph: Graph) -> Tensor:
            energies, features = last_layer(self.backbone, graph)  # [N], [N, D]
            deviations = self.heads(features)  # [N, M]
            deviations = deviations - deviations.mean(dim=1, keepdim=True)
            by_member = energies[:, None] + energy_scale(self.backbone) * deviations  # [N, M]
            energy = graph.sum_over_structures(by_member)  # [S, M]
            outputs.update({keys.ENERGY: energy.T, keys.ENERGIES: by_member.T})
            return energy.sum(dim=0)

        if forces:
            outputs[keys.FORCES] = -gradient_of_each(
                total_energies, graph, self.heads.out_features, create_graph=create_graph
            )
        else:
            total_energies(graph)
        return outputs if create_graph else {k: v.detach() for k, v in outputs.items()}

    def loss_terms(
        self, batch: Batch, config: TrainingConfig, derivatives: Derivatives
    ) -> dict[str, Tensor]:
        """Compute the distribution loss of the members."""
        if derivatives.get("stress"):
            raise ConfigError("ShallowEnsemble predicts no stress; set training.weights.stress=0")
        outputs = self.members(
            batch.graph,
            forces=derivatives.get("forces", True),
            create_graph=derivatives.get("create_graph", False),
        )
        config = config.model_copy(update={"loss": self.loss})
        return data_loss(outputs, batch.targets, batch.graph.node_counts(), config)

    def predict_graph(
        self, graph: Graph, *, seed: int = 0, forces: bool = True, stress: bool = False
    ) -> Prediction:
        """Predict mean and (M-1)-normalised std of the members; the stress is their mean alone."""

        def sampler(graph: Graph, numbers: range) -> Outputs:
            outputs = self.members(graph, forces=forces)
            return {name: value.flatten(end_dim=1) for name, value in outputs.items()}

        count = self.heads.out_features
        prediction = monte_carlo(sampler, graph, count, method=self.kind, chunk=count)
        if not stress:
            return prediction
        mean = self.predict_mean(graph, forces=False, stress=True)
        return replace(prediction, stress=mean.stress)
