"""How a prediction is made: sampled, with frozen draws, in one pass, or without deviations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from blips.adaptive import Tolerance, adaptive_monte_carlo, joined_details
from blips.backbones.base import Backbone
from blips.backbones.derivatives import Derivatives
from blips.data.graph import AtomGraph, Graph
from blips.defaults import SAMPLES
from blips.errors import InputError, TooLargeError
from blips.inference.posterior import ConditionedPosterior
from blips.onepass import OnePass
from blips.predict import Outputs, Prediction, point_prediction
from blips.sampling import MemoryBound, is_large, monte_carlo
from blips.spread import ForceSpread

METHODS = ("auto", "conditioned", "mc", "frozen", "onepass", "map")
Samples = int | Literal["auto"]


class Potential(Protocol):
    """What a prediction needs of a Bayesian potential."""

    @property
    def backbone(self) -> Backbone:
        """The converted model."""
        ...

    @property
    def one_pass(self) -> Callable[..., OnePass]:
        """(graph, **derivatives) -> first-order variances."""
        ...

    @property
    def posterior(self) -> ConditionedPosterior | None:
        """The conditioned posterior, where there is one."""
        ...

    @property
    def predict_conditioned(self) -> Callable[..., Prediction]:
        """(graph, samples, seed, forces, stress, covariance) -> prediction of a batch."""
        ...

    @property
    def force_spread(self) -> ForceSpread | None:
        """Weights of the forces' covariance in one pass, where they were fitted."""
        ...

    def outputs_of(
        self,
        graph: Graph,
        numbers: range | None,
        seed: int,
        derivatives: Derivatives,
        frozen: bool = False,
    ) -> Outputs:
        """Outputs of the samples with these numbers (None for MAP)."""
        ...

    def coefficients(self, graph: Graph) -> dict[str, Tensor]:
        """Alpha and beta of every Bayesian map."""
        ...

    def samples_at_once(self, graph: Graph, samples: int, bound: MemoryBound, seed: int) -> int:
        """How many samples fit a bound; an error where not even one does."""
        ...


@dataclass(frozen=True)
class Request:
    """What is asked of a prediction; the arguments of `BayesianPotential.predict`."""

    method: str = "auto"
    samples: Samples = SAMPLES
    tolerance: float = 0.1
    max_samples: int = 512
    seed: int = 0
    forces: bool = True
    stress: bool = False
    covariance: bool = False
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        """Refuse unknown methods and numbers of samples."""
        if self.method not in METHODS:
            raise InputError(f"unknown method {self.method!r}; use one of {', '.join(METHODS)}")
        if isinstance(self.samples, str) and self.samples != "auto":
            raise InputError(f'samples={self.samples!r}; expected a whole number or "auto"')

    @property
    def derivatives(self) -> Derivatives:
        """Which derivatives are asked for."""
        return Derivatives(forces=self.forces, stress=self.stress)

    @property
    def memory(self) -> MemoryBound:
        """What passes may take."""
        return MemoryBound.of(self.memory_gb)

    @property
    def stop(self) -> Tolerance | None:
        """When to stop sampling, where the number of samples is open."""
        open_ended = self.samples == "auto"
        return Tolerance(self.tolerance, self.max_samples) if open_ended else None


class Choice(NamedTuple):
    """What method="auto" became."""

    request: Request
    reason: str


def choose(potential: Potential, graph: Graph, request: Request) -> Choice:
    """The method that is right furthest from the data, then the cheapest.

    The conditioned posterior where there is one. Otherwise one pass where it can (energies always,
    forces where `distil_forces` was called), or as many samples as `tolerance` needs.
    """
    if potential.posterior is not None and isinstance(graph, AtomGraph):
        samples = SAMPLES if request.samples == "auto" else request.samples
        conditioned = replace(request, method="conditioned", samples=samples)
        return Choice(conditioned, "the potential is conditioned on data")
    sampled = replace(request, method="mc")
    one_pass = replace(request, method="onepass")
    if not isinstance(graph, AtomGraph):
        return Choice(sampled, "only sampling gives deviations of positions")
    if request.stress:
        return Choice(sampled, "only sampling gives deviations of the stress")
    if not request.forces:
        return Choice(one_pass, "one pass gives the deviation of energies")
    if potential.force_spread is not None:
        return Choice(one_pass, "one pass gives energies, and forces as distil_forces learned")
    return Choice(sampled, "forces are sampled until distil_forces has been called")


def predict_within(potential: Potential, graph: Graph, request: Request) -> list[Prediction]:
    """Predictions of the structures of a batch, in parts where the whole needs too much memory."""
    try:
        return [predict_graph(potential, graph, request)]
    except TooLargeError:
        if graph.num_structures == 1:
            raise
    return [part for half in graph.halves() for part in predict_within(potential, half, request)]


def predict_graph(potential: Potential, graph: Graph, request: Request) -> Prediction:
    """Prediction of one batch, not recalibrated."""
    if is_large(graph):
        potential.samples_at_once(
            graph, 1, request.memory, request.seed
        )  # refuses what is too large
    if request.method == "auto":
        choice = choose(potential, graph, request)
        found = predict_graph(potential, graph, choice.request)
        return replace(found, details={**found.details, "chosen_because": choice.reason})
    if request.method == "map":
        outputs = potential.outputs_of(graph, None, 0, request.derivatives)
        return point_prediction(outputs, graph)
    if request.method == "conditioned":
        return potential.predict_conditioned(
            graph,
            samples=SAMPLES if request.samples == "auto" else request.samples,
            seed=request.seed,
            forces=request.forces,
            stress=request.stress,
            covariance=request.covariance,
        )
    if request.method == "onepass":
        return _in_one_pass(potential, graph, request)
    return _sampled(potential, graph, request)


def join(parts: Sequence[Prediction]) -> Prediction:
    """One prediction out of those of the batches."""
    whole = Prediction.join(parts)
    if "sigma_relative_error" not in whole.details:
        return whole
    most = max(part.samples for part in parts)
    return replace(whole, samples=most, details=joined_details(list(parts)))


def _in_one_pass(potential: Potential, graph: Graph, request: Request) -> Prediction:
    if potential.posterior is not None and not (request.forces and potential.force_spread):
        return potential.predict_conditioned(
            graph, samples=0, seed=request.seed, forces=request.forces, stress=request.stress
        )
    found = potential.one_pass(graph, **request.derivatives)
    changes: dict[str, Any] = {}
    changes["energy_std"] = found.attribution().energy_var.sqrt().cpu().numpy()
    spread = potential.force_spread
    if request.forces and spread is not None:
        cov = spread.covariance(found).cpu().numpy()
        changes["forces_std"] = np.sqrt(np.diagonal(cov, axis1=1, axis2=2))
        if request.covariance:
            changes["forces_cov"] = cov
    return replace(point_prediction(found.outputs, graph, method="onepass"), **changes)


def _sampled(potential: Potential, graph: Graph, request: Request) -> Prediction:
    def sampler(graph: Graph, numbers: range) -> Outputs:
        frozen = request.method == "frozen"
        return potential.outputs_of(graph, numbers, request.seed, request.derivatives, frozen)

    stop = request.stop
    most = request.max_samples if request.samples == "auto" else request.samples
    chunk = potential.samples_at_once(graph, most, request.memory, request.seed)
    options: dict[str, Any] = {
        "method": request.method,
        "chunk": chunk,
        "covariance": request.covariance,
    }
    if stop is not None:
        return adaptive_monte_carlo(sampler, graph, stop, **options)
    return monte_carlo(sampler, graph, most, **options)
