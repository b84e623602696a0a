"""Choose a method, and predict batches by it.

| method | means | std | where |
|---|---|---|---|
| conditioned | the plain model's | of draws that have seen the data | `inference.conditioned` |
| mc | of samples | the paper's posterior, fresh weights for each row | `inference.monte_carlo` |
| frozen | of a committee | the paper's, one draw for all rows | `inference.monte_carlo` |
| onepass | the plain model's | of energies, without sampling | `inference.onepass` |
| map | the plain model's | none | |
| auto | | conditioned where there is such a posterior, else see `choose` | |

Data flow one way: a potential hands its parts down, and nothing here knows a potential.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from blips.backbones.derivatives import Derivatives
from blips.data.graph import AtomGraph, Graph
from blips.defaults import SAMPLES
from blips.errors import InputError, TooLargeError
from blips.inference.conditioned import predict_conditioned
from blips.inference.domain import Domain
from blips.inference.memory import MemoryBound, MemoryGauge, is_large
from blips.inference.monte_carlo import (
    Tolerance,
    adaptive_monte_carlo,
    joined_details,
    monte_carlo,
)
from blips.inference.onepass import one_pass
from blips.inference.posterior import ConditionedPosterior
from blips.inference.sampling import Stochastic
from blips.prediction import Outputs, Prediction, point_prediction

METHODS = ("auto", "conditioned", "mc", "frozen", "onepass", "map")
CONDITIONED = ("auto", "conditioned", "onepass")  # use the conditioned posterior if there is one
Samples = int | Literal["auto"]


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


class Parts(NamedTuple):
    """What a prediction needs of a Bayesian potential.

    Attributes:
        stochastic: the converted model and its inference network.
        roles: row type of each Bayesian map, by name.
        posterior: the conditioned posterior, where there is one.
        domain: what the model can know something about.
        gauge: of the memory that passes need.
    """

    stochastic: Stochastic
    roles: Mapping[str, str]
    posterior: ConditionedPosterior | None
    domain: Domain
    gauge: MemoryGauge


def predict(parts: Parts, graphs: Iterable[Graph], request: Request) -> Prediction:
    """Predict batches and join them; a batch that is too large for the memory is divided."""
    found = [one for graph in graphs for one in _within_memory(parts, graph, request)]
    whole = Prediction.join(found)
    if "std_relative_error" not in whole.details:
        return whole
    most = max(one.samples for one in found)
    return replace(whole, samples=most, details=joined_details(found))


def _within_memory(parts: Parts, graph: Graph, request: Request) -> list[Prediction]:
    try:
        return [predict_batch(parts, graph, request)]
    except TooLargeError:
        if graph.num_structures == 1:
            raise
    return [one for half in graph.halves() for one in _within_memory(parts, half, request)]


def predict_batch(parts: Parts, graph: Graph, request: Request) -> Prediction:
    """Predict one batch, not recalibrated."""
    chosen, reason = choose(parts.posterior, graph, request)
    run = BY_METHOD[chosen.method]
    if is_large(graph) and chosen.method not in SAMPLED:  # these are bounded chunk by chunk
        kind = (chosen.method, chosen.samples, chosen.forces, chosen.stress, chosen.covariance)
        parts.gauge.check(kind, graph, chosen.memory, lambda part: run(parts, part, chosen))
    found = run(parts, graph, chosen)
    details = {**found.details, "chosen_because": reason} if reason else found.details
    inside = (
        parts.domain.contains(graph).numpy(force=True) if isinstance(graph, AtomGraph) else None
    )
    return replace(found, details=details, in_domain=inside)


class Choice(NamedTuple):
    """What a request became, and why if a method was chosen."""

    request: Request
    reason: str | None


def choose(posterior: ConditionedPosterior | None, graph: Graph, request: Request) -> Choice:
    """Choose the method that is right furthest from the data, then the cheapest.

    That is the conditioned posterior where there is one. Otherwise energies alone take one pass,
    and everything else samples.
    """
    if request.method != "auto":
        return Choice(request, None)
    if posterior is not None and isinstance(graph, AtomGraph):
        conditioned = replace(request, method="conditioned")
        return Choice(conditioned, "the potential is conditioned on data")
    if request.forces or request.stress or not isinstance(graph, AtomGraph):
        sampled = replace(request, method="mc")
        return Choice(sampled, "the potential is not conditioned on data, so it is sampled")
    return Choice(replace(request, method="onepass"), "one pass gives the deviation of energies")


def _map(parts: Parts, graph: Graph, request: Request) -> Prediction:
    with torch.no_grad():
        return point_prediction(parts.stochastic.means(graph, **request.derivatives), graph)


def _conditioned(parts: Parts, graph: Graph, request: Request) -> Prediction:
    posterior = parts.posterior
    if posterior is None:
        raise InputError(NOT_CONDITIONED)
    model = parts.stochastic
    return predict_conditioned(
        model.backbone,
        posterior,
        graph,
        samples=SAMPLES if request.samples == "auto" else request.samples,
        seed=request.seed,
        forces=request.forces,
        stress=request.stress,
        covariance=request.covariance,
        coefficients=model.coefficients if posterior.coefficients == "network" else None,
    )


def _in_one_pass(parts: Parts, graph: Graph, request: Request) -> Prediction:
    if parts.posterior is not None:
        return _conditioned(parts, graph, replace(request, samples=0, covariance=False))
    found = one_pass(parts.stochastic, graph, parts.roles, **request.derivatives)
    outputs = found.outputs | {"energy_std": found.energy_var.sqrt()}
    return point_prediction(outputs, graph, method="onepass")


def _sampled(parts: Parts, graph: Graph, request: Request) -> Prediction:
    def sampler(graph: Graph, numbers: range) -> Outputs:
        frozen = request.method == "frozen"
        return parts.stochastic.numbered(graph, numbers, request.seed, frozen, request.derivatives)

    most = request.max_samples if request.samples == "auto" else request.samples
    kind = (request.method, request.forces, request.stress)
    chunk = parts.gauge.chunk(
        kind, graph, most, request.memory, lambda part: sampler(part, range(1))
    )
    options: dict[str, Any] = {
        "method": request.method,
        "chunk": chunk,
        "covariance": request.covariance,
    }
    if request.samples == "auto":
        tolerance = Tolerance(request.tolerance, request.max_samples)
        return adaptive_monte_carlo(sampler, graph, tolerance, **options)
    return monte_carlo(sampler, graph, most, **options)


NOT_CONDITIONED = (
    "the potential is not conditioned on data; call potential.condition(structures, "
    "valid=labelled structures), or blips condition"
)
SAMPLED = ("mc", "frozen")
BY_METHOD: dict[str, Callable[[Parts, Graph, Request], Prediction]] = {
    "conditioned": _conditioned,
    "mc": _sampled,
    "frozen": _sampled,
    "onepass": _in_one_pass,
    "map": _map,
}
