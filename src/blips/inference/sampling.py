"""Outputs for weights drawn from a posterior, and single draws as potentials of their own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Unpack

import torch
from ase import Atoms
from torch import Tensor, nn

from blips import keys
from blips.backbones.base import Backbone, graph_batches
from blips.backbones.derivatives import Derivatives, asked_for, energy_and_derivatives
from blips.bayes import noise as noise_context
from blips.bayes.noise import FrozenDraw, FrozenNoise, Noise, SampledNoise
from blips.data.graph import AtomGraph, Graph
from blips.errors import InputError
from blips.inference.conditioned import linearise
from blips.inference.posterior import ConditionedPosterior
from blips.prediction import Outputs, Prediction, point_prediction

Coefficients = Mapping[str, Tensor]
CoefficientFunction = Callable[[Graph], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Sample:
    """Outputs of posterior samples, and the coefficients that they were drawn with.

    Attributes:
        outputs: energy [K * S], forces [K * N, 3], ..., replica-major.
        coefficients: [K * rows] by map name; empty for MAP.
    """

    outputs: Outputs
    coefficients: Coefficients


@dataclass(frozen=True)
class Stochastic:
    """A backbone with Bayesian maps and the inference network of their widths.

    Attributes:
        backbone: the converted model.
        coefficients: the inference network on a graph.
        estimator: how rows are sampled: "auto", "local" or "flipout".
    """

    backbone: Backbone
    coefficients: CoefficientFunction
    estimator: str = "auto"

    def means(self, graph: Graph, **derivatives: Unpack[Derivatives]) -> Outputs:
        """Compute the outputs for the posterior means."""
        return self._evaluate(graph, None, derivatives).outputs

    def sample(
        self,
        graph: Graph,
        generators: Sequence[torch.Generator],
        **derivatives: Unpack[Derivatives],
    ) -> Sample:
        """Draw K = len(generators) samples, each row with weights of its own."""
        return self._evaluate(
            graph.replicate(len(generators)),
            lambda coefficients: SampledNoise(coefficients, generators, self.estimator),
            derivatives,
        )

    def frozen(
        self, graph: Graph, draws: Sequence[FrozenDraw], **derivatives: Unpack[Derivatives]
    ) -> Sample:
        """Evaluate K = len(draws) members, each with one draw for all rows and all calls."""
        return self._evaluate(
            graph.replicate(len(draws)),
            lambda coefficients: FrozenNoise(coefficients, draws),
            derivatives,
        )

    def numbered(
        self, graph: Graph, numbers: range, seed: int, frozen: bool, derivatives: Derivatives
    ) -> Outputs:
        """Compute the outputs of the numbered samples (or frozen members), without autograd."""
        with torch.no_grad():  # forces switch gradients on where they need them
            if frozen:
                draws = [FrozenDraw(seed, member) for member in numbers]
                return self.frozen(graph, draws, **derivatives).outputs
            device = graph.positions.device
            generators = noise_context.generators(seed, len(numbers), numbers.start, device)
            return self.sample(graph, generators, **derivatives).outputs

    def _evaluate(
        self,
        graph: Graph,
        make_noise: Callable[[Coefficients], Noise] | None,
        derivatives: Derivatives,
    ) -> Sample:
        """Compute outputs under the noise that `make_noise` builds from the coefficients.

        The coefficients are functions of the positions, so they are evaluated inside the energy
        that forces differentiate.
        """
        coefficients: dict[str, Tensor] = {}

        def outputs_of(graph: Graph) -> Outputs:
            if make_noise is not None:
                coefficients.update(self.coefficients(graph))
            with noise_context.use(make_noise and make_noise(coefficients)):
                return self.backbone(graph)

        if not self.backbone.conservative:
            return Sample(asked_for(outputs_of(graph), graph, derivatives), coefficients)
        if not isinstance(graph, AtomGraph):
            raise InputError(f"a potential needs an AtomGraph, got {type(graph).__name__}")
        outputs = energy_and_derivatives(
            lambda graph: outputs_of(graph)[keys.ENERGIES], graph, **derivatives
        )
        return Sample(outputs, coefficients)


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
