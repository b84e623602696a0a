"""Choose a method, and predict batches by it.

| method | means | std | where |
|---|---|---|---|
| conditioned | the plain model's | of draws that have seen the data | `inference.conditioned` |
| mc | of samples | the paper's posterior, fresh weights for each row | `inference.monte_carlo` |
| frozen | of a committee | the paper's, one draw for all rows | `inference.monte_carlo` |
| onepass | the plain model's | of energies, to first order, by one pass | `inference.onepass` |
| map | the plain model's | none | |
| auto | | conditioned where there is such a posterior, else see `choose` | |
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from numbers import Integral

import torch

from blips.backbones.base import first_parameter
from blips.backbones.derivatives import Derivatives
from blips.bayes.noise import FrozenDraw, generators
from blips.data.graph import AtomGraph, Graph
from blips.defaults import SAMPLES
from blips.errors import InputError, TooLargeError
from blips.inference.conditioned import predict_conditioned
from blips.inference.domain import EVERY_ELEMENT
from blips.inference.memory import is_large
from blips.inference.monte_carlo import MOST, Samples, joined_details, monte_carlo
from blips.inference.onepass import one_pass
from blips.inference.posterior import ConditionedPosterior
from blips.inference.sampling import StochasticModel
from blips.prediction import Outputs, Prediction, point_prediction

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
    covariance: bool = False
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        """Refuse unknown methods and numbers of samples."""
        if self.method not in METHODS:
            raise InputError(f"unknown method {self.method!r}; use one of {', '.join(METHODS)}")
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


def predict(model: StochasticModel, graphs: Iterable[Graph], request: Request) -> Prediction:
    """Predict batches and join them; a batch that is too large for the memory is divided."""
    found = [one for graph in graphs for one in _within_memory(model, graph, request)]
    whole = Prediction.join(found)
    if "std_relative_error" not in whole.details:
        return whole
    most = max(one.samples for one in found)
    return replace(whole, samples=most, details=joined_details(found))


def _within_memory(model: StochasticModel, graph: Graph, request: Request) -> list[Prediction]:
    try:
        return [predict_batch(model, graph, request)]
    except TooLargeError:
        if graph.num_structures == 1:
            raise
    return [one for half in graph.halves() for one in _within_memory(model, half, request)]


def predict_batch(model: StochasticModel, graph: Graph, request: Request) -> Prediction:
    """Predict one batch, not recalibrated."""
    chosen = choose(model.posterior, graph, request)
    run = BY_METHOD[chosen.method]
    bounded = is_large(graph) or chosen.memory_gb is not None
    if bounded and chosen.method not in SAMPLED:  # these are bounded chunk by chunk
        kind = (*_kind(model, chosen), chosen.samples, chosen.covariance)
        model.gauge.check(kind, graph, chosen.memory_gb, lambda part: run(model, part, chosen))
    found = run(model, graph, chosen)
    details = dict(found.details)
    if request.method == "auto":
        details["chosen_because"] = WHY[chosen.method]
    if not isinstance(graph, AtomGraph):
        return replace(found, details=details)
    domain = EVERY_ELEMENT if model.posterior is None else model.posterior.domain
    return replace(found, details=details, in_domain=domain.contains(graph).numpy(force=True))


def choose(posterior: ConditionedPosterior | None, graph: Graph, request: Request) -> Request:
    """Choose the method that is right furthest from the data, then the cheapest.

    That is the conditioned posterior where there is one. Otherwise energies alone take one pass,
    and everything else samples.
    """
    if request.method != "auto":
        return request
    if posterior is not None and isinstance(graph, AtomGraph):
        return replace(request, method="conditioned")
    sampled = request.forces or request.stress or not isinstance(graph, AtomGraph)
    return replace(request, method="mc" if sampled else "onepass")


def _kind(model: StochasticModel, request: Request) -> tuple[Hashable, ...]:
    """Return what the memory of a pass depends on, beside the graph and the posterior."""
    dtype = first_parameter(model.backbone).dtype
    return (request.method, request.forces, request.stress, dtype)


WHY = {
    "conditioned": "the potential is conditioned on data",
    "mc": "the potential is not conditioned on data, so it is sampled",
    "onepass": "one pass gives the deviation of energies",
}


def _map(model: StochasticModel, graph: Graph, request: Request) -> Prediction:
    with torch.no_grad():
        return point_prediction(model(graph, **request.derivatives), graph)


def _conditioned(model: StochasticModel, graph: Graph, request: Request) -> Prediction:
    posterior = model.conditioned()
    return predict_conditioned(
        model.linear_model(posterior),
        posterior,
        graph,
        samples=SAMPLES if request.samples == "auto" else request.samples,
        seed=request.seed,
        forces=request.forces,
        stress=request.stress,
        covariance=request.covariance,
    )


def _in_one_pass(model: StochasticModel, graph: Graph, request: Request) -> Prediction:
    if model.posterior is not None:
        return _conditioned(model, graph, replace(request, samples=0, covariance=False))
    found = one_pass(model, graph, forces=request.forces, stress=request.stress)
    outputs = found.outputs | {"energy_std": found.energy_var.sqrt()}
    return point_prediction(outputs, graph, method="onepass")


def _sampled(model: StochasticModel, graph: Graph, request: Request) -> Prediction:
    """Sample k is a function of (seed, k)."""

    @torch.no_grad()  # forces switch gradients on where they need them
    def sampler(graph: Graph, numbers: range) -> Outputs:
        if request.method == "frozen":
            draws = [FrozenDraw(request.seed, number) for number in numbers]
            return model.frozen(graph, draws, **request.derivatives).outputs
        device = graph.positions.device
        sources = generators(request.seed, len(numbers), numbers.start, device)
        return model.sample(graph, sources, **request.derivatives).outputs

    most = MOST if request.samples == "auto" else request.samples
    kind, once = _kind(model, request), lambda part: sampler(part, range(1))
    chunk = model.gauge.chunk(kind, graph, most, request.memory_gb, once)
    options = {"covariance": request.covariance, "tolerance": request.tolerance}
    return monte_carlo(
        sampler, graph, request.samples, method=request.method, chunk=chunk, **options
    )


SAMPLED = ("mc", "frozen")
BY_METHOD: dict[str, Callable[[StochasticModel, Graph, Request], Prediction]] = {
    "conditioned": _conditioned,
    "mc": _sampled,
    "frozen": _sampled,
    "onepass": _in_one_pass,
    "map": _map,
}
