"""Members of a committee: draws from the posterior that stay as they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Unpack

import torch
from ase import Atoms
from torch import Tensor, nn

from blips.backbones.base import Backbone, graph_batches
from blips.backbones.derivatives import Derivatives
from blips.bayes.noise import FrozenDraw
from blips.data.graph import Graph
from blips.predict import Outputs, Prediction, point_prediction


@dataclass(frozen=True)
class LinearDraw:
    """Noise v [d] of a member that is linear in it, E + b . v."""

    v: Tensor


class Sample(Protocol):
    """Outputs of members."""

    @property
    def outputs(self) -> Outputs:
        """Energy [K * S], forces [K * N, 3], ..., replica-major."""
        ...


class Potential(Protocol):
    """What a member needs of a Bayesian potential."""

    @property
    def backbone(self) -> Backbone:
        """The converted model."""
        ...

    def frozen(
        self, graph: Graph, draws: Sequence[FrozenDraw], **derivatives: Unpack[Derivatives]
    ) -> Sample:
        """Outputs of K = len(draws) members."""
        ...

    def linear_member(self, graph: Graph, v: Tensor, **derivatives: Unpack[Derivatives]) -> Outputs:
        """Outputs of the conditioned member with noise v [d]."""
        ...


class FrozenMember(nn.Module):
    """One frozen draw of a Bayesian potential: deterministic, smooth, conservative."""

    def __init__(self, potential: Potential, draw: FrozenDraw | LinearDraw) -> None:
        super().__init__()
        self.potential = potential
        self.frozen_draw = draw

    def forward(self, graph: Graph, **derivatives: Unpack[Derivatives]) -> Outputs:
        """As `BayesianPotential.forward`, with this member's weights."""
        draw = self.frozen_draw
        if isinstance(draw, LinearDraw):
            return self.potential.linear_member(graph, draw.v, **derivatives)
        return self.potential.frozen(graph, [draw], **derivatives).outputs

    def predict(
        self,
        atoms: Atoms | Sequence[Atoms] | Graph,
        *,
        forces: bool = True,
        stress: bool = False,
        batch_size: int = 32,
    ) -> Prediction:
        """This member's energies, forces and stress; a single draw has no error bars."""
        parts: list[Prediction] = []
        for graph in graph_batches(self.potential.backbone, atoms, batch_size):
            with torch.no_grad():  # forces switch gradients on where they need them
                outputs = self(graph, forces=forces, stress=stress)
            parts.append(point_prediction(outputs, graph, method="frozen member"))
        return Prediction.join(parts)
