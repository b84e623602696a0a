"""Single draws from a posterior as potentials of their own."""

from collections.abc import Sequence
from typing import Protocol, Unpack

import torch
from ase import Atoms
from torch import Tensor, nn

from blips.backbones.base import Backbone, graph_batches
from blips.backbones.derivatives import Derivatives
from blips.bayes.noise import FrozenDraw
from blips.data.graph import Graph
from blips.errors import InputError
from blips.inference.conditioned import linearise
from blips.inference.posterior import ConditionedPosterior
from blips.inference.sampling import Sample
from blips.prediction import Outputs, Prediction, point_prediction


class Drawable(Protocol):
    """What members need of a Bayesian potential."""

    backbone: Backbone

    def frozen(
        self, graph: Graph, draws: Sequence[FrozenDraw], **derivatives: Unpack[Derivatives]
    ) -> Sample:
        """Draw members of the paper's posterior."""
        ...

    def conditioned(self) -> ConditionedPosterior:
        """Return the conditioned posterior."""
        ...

    def coefficients(self, graph: Graph) -> dict[str, Tensor]:
        """Run the inference network on a graph."""
        ...


class Member(nn.Module):
    """One draw from the posterior of a potential: deterministic, smooth, conservative.

    Args:
        potential: whose backbone and inference network it shares.
        noise: a frozen draw of the paper's posterior, or v [d] of the conditioned one: the member
            is linear in it, E + b . v.
    """

    def __init__(self, potential: Drawable, noise: FrozenDraw | Tensor) -> None:
        super().__init__()
        self.potential = potential
        self.noise = noise

    def forward(self, graph: Graph, **derivatives: Unpack[Derivatives]) -> Outputs:
        """Compute what `BayesianPotential.forward` does, with this member's weights."""
        potential, noise = self.potential, self.noise
        if isinstance(noise, FrozenDraw):
            return potential.frozen(graph, [noise], **derivatives).outputs
        if derivatives.get("create_graph"):
            raise InputError("members of a conditioned posterior cannot be trained")
        posterior = potential.conditioned()
        return linearise(
            potential.backbone,
            posterior,
            graph,
            derivatives.get("forces", True),
            derivatives.get("stress", False),
            potential.coefficients if posterior.coefficients == "network" else None,
        ).member(noise)

    def predict(
        self,
        atoms: Atoms | Sequence[Atoms] | Graph,
        *,
        forces: bool = True,
        stress: bool = False,
        batch_size: int = 32,
    ) -> Prediction:
        """Predict this member's energies, forces and stress; a single draw has no error bars."""
        parts: list[Prediction] = []
        for graph in graph_batches(self.potential.backbone, atoms, batch_size):
            with torch.no_grad():  # forces switch gradients on where they need them
                outputs = self(graph, forces=forces, stress=stress)
            parts.append(point_prediction(outputs, graph, method="member"))
        return Prediction.join(parts)
