"""What every method is given: a backbone with posteriors, and what is asked of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, Unpack

import torch
from ase import Atoms
from torch import Tensor, nn

from blips.backbones.base import Backbone, first_parameter, graph_batches
from blips.backbones.derivatives import Derivatives, plain_outputs
from blips.bayes import noise as noise_context
from blips.bayes.convert import ConversionReport
from blips.bayes.encoder import InferenceNetwork
from blips.bayes.kl import prior_coefficient
from blips.bayes.noise import ESTIMATORS, FrozenDraw, Noise, Source
from blips.data.graph import Graph
from blips.defaults import SAMPLES
from blips.errors import InputError, refuse_unknown
from blips.inference.alignment import Alignment
from blips.inference.linearise import LinearModel
from blips.inference.memory import MemoryGauge, keep_freed_memory
from blips.inference.monte_carlo import Samples
from blips.inference.posterior import ConditionedPosterior, SeenWeights
from blips.prediction import Calibrator, Outputs, Prediction, point_prediction

METHODS = ("auto", "conditioned", "mc", "frozen", "onepass", "map")


@dataclass(frozen=True)
class Request:
    """What is asked of a prediction; the arguments of `BayesianPotential.predict`."""

    method: str = "auto"
    samples: Samples = SAMPLES
    tolerance: float = 0.1
    seed: int = 0
    forces: bool = True
    stress: bool = False
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        """Refuse unknown methods and numbers of samples."""
        refuse_unknown("method", self.method, METHODS)
        if self.samples != "auto" and not isinstance(self.samples, Integral):
            raise InputError(f'samples={self.samples!r}; expected a whole number or "auto"')
        if not 0 < self.tolerance < 1:
            raise InputError(
                f"tolerance={self.tolerance}: the relative error of a standard deviation is a "
                "number between 0 and 1, such as 0.1 (about 50 samples)"
            )

    @property
    def derivatives(self) -> Derivatives:
        """Which derivatives are asked for."""
        return Derivatives(forces=self.forces, stress=self.stress)


@dataclass(frozen=True)
class Sample:
    """Outputs of posterior samples, and the coefficients that they were drawn with."""

    outputs: Outputs  # energy [K * S], forces [K * N, 3], ..., replica-major
    coefficients: Mapping[str, Tensor]  # [K * rows] by map name; empty for MAP


class StochasticModel(nn.Module):
    """A backbone whose maps have posteriors: the paper's, and one that has seen data."""

    def __init__(
        self,
        backbone: Backbone,
        encoder: InferenceNetwork,
        conversion: ConversionReport,
        settings: dict[str, Any],
    ) -> None:
        super().__init__()
        keep_freed_memory()
        refuse_unknown("estimator", settings["estimator"], ESTIMATORS)
        self.backbone = backbone  # converted; its state dict is that of the plain model
        self.encoder = encoder  # the inference network of the paper's posterior
        self.conversion = conversion
        self.roles = conversion.roles  # row type of each Bayesian map, by name
        self.settings = settings  # what `bayesianize` was called with, for checkpoints
        self.estimator: str = settings["estimator"]  # how rows are sampled: "local", ...
        self.rho = prior_coefficient(settings["prior_dropout"])  # p / (1 - p)
        self.num_weights = {  # random ones of each Bayesian map
            name: sum(
                weight.numel()
                for key, weight in backbone.get_submodule(name).named_parameters(recurse=False)
                if key != "bias"
            )
            for name in self.roles
        }
        self.posterior = None  # the conditioned one
        self.calibration: dict[str, Calibrator] = {}  # by quantity: "energy", "forces", ...
        self.alignment: Alignment | None = None  # what is unsure about the backbone's `reference`

    def coefficients(self, graph: Graph) -> dict[str, Tensor]:
        """Compute alpha and beta of every Bayesian map on this input, [rows] by map name."""
        return self.encoder(self.backbone.row_features(graph))

    def forward(self, graph: Graph, **derivatives: Unpack[Derivatives]) -> Outputs:
        """Compute outputs at the posterior means, at the cost of the plain model."""
        return plain_outputs(self.backbone, graph, **derivatives)

    def sample(
        self, graph: Graph, sources: Sequence[Source], **derivatives: Unpack[Derivatives]
    ) -> Sample:
        """Draw K = len(sources) posterior samples; the graph is replicated K times.

        With `blips.bayes.noise.generators` each row has weights of its own; with a `FrozenDraw` all
        rows and all calls share them, which makes a member. The coefficients are functions of the
        positions, so they are evaluated inside the energy that forces differentiate.
        """
        graph = graph.replicate(len(sources))
        coefficients: dict[str, Tensor] = {}

        def run(graph: Graph) -> Outputs:
            coefficients.update(self.coefficients(graph))
            with noise_context.use(Noise(coefficients, sources, self.estimator)):
                return self.backbone(graph)

        outputs = plain_outputs(self.backbone, graph, run, **derivatives)
        return Sample(outputs, coefficients)

    @property
    def posterior(self) -> ConditionedPosterior | None:
        """The posterior that has seen data; setting it notes the weights that it is of."""
        return self._posterior

    @posterior.setter
    def posterior(self, posterior: ConditionedPosterior | None) -> None:
        self._posterior = posterior
        weight_bytes = sum(self.num_weights.values()) * first_parameter(self.backbone).itemsize
        self.gauge = MemoryGauge(weight_bytes)  # passes with it have a cost of their own
        self._seen = None if posterior is None else SeenWeights(self._model_of(posterior))

    def conditioned(self) -> ConditionedPosterior:
        """Return the conditioned posterior; an error where there is none for these weights."""
        if self.posterior is None or self._seen is None:
            raise InputError(
                "the potential is not conditioned on data; call potential.condition(structures, "
                "valid=labelled structures), or blips condition"
            )
        self._seen.check(self._model_of(self.posterior))
        return self.posterior

    def _model_of(self, posterior: ConditionedPosterior) -> nn.Module:
        """Return the modules that the posterior depends on."""
        return self if posterior.coefficients == "network" else self.backbone

    def linear_model(self) -> LinearModel:
        """Return the model to first order in the noise of the weights that are conditioned."""
        posterior = self.conditioned()
        network = self.coefficients if posterior.coefficients == "network" else None
        return LinearModel(self.backbone, posterior.maps, network)


class Member(nn.Module):
    """One draw from the posterior of a potential: deterministic, smooth, conservative.

    It shares the potential's weights. The noise is a frozen draw of the paper's posterior, or v [d]
    of the conditioned one: the member is linear in it, E + b . v.
    """

    def __init__(self, potential: StochasticModel, noise: FrozenDraw | Tensor) -> None:
        super().__init__()
        self.potential = potential
        self.noise = noise

    def forward(self, graph: Graph, *, forces: bool = True, stress: bool = False) -> Outputs:
        """Compute what `BayesianPotential.forward` does, with this member's weights."""
        if isinstance(self.noise, FrozenDraw):
            sample = self.potential.sample(graph, [self.noise], forces=forces, stress=stress)
            return sample.outputs
        linearised = self.potential.linear_model()(graph, forces=forces, stress=stress)
        return linearised.member(self.noise)

    def predict(
        self,
        atoms: Atoms | Sequence[Atoms] | Graph,
        *,
        forces: bool = True,
        stress: bool = False,
        batch_size: int | None = None,
    ) -> Prediction:
        """Predict this member's energies, forces and stress; a single draw has no error bars."""
        graphs = graph_batches(self.potential.backbone, atoms, batch_size)
        run = partial(self, forces=forces, stress=stress)
        with torch.no_grad():  # forces switch gradients on where they need them
            return Prediction.join([point_prediction(run(g), g, "member") for g in graphs])
