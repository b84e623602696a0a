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
from dataclasses import replace
from typing import Any

import torch

from blips.backbones.base import first_parameter
from blips.bayes.noise import FrozenDraw, generators
from blips.data.graph import AtomGraph, Graph
from blips.errors import TooLargeError
from blips.inference.conditioned import predict_conditioned
from blips.inference.domain import Domain
from blips.inference.memory import is_large
from blips.inference.monte_carlo import MOST, monte_carlo
from blips.inference.onepass import one_pass
from blips.inference.posterior import ConditionedPosterior
from blips.inference.sampling import Request, StochasticModel
from blips.prediction import Outputs, Prediction, point_prediction

EVERY_ELEMENT = Domain()  # of a model that has seen nothing: distances by covalent radii


def predict(model: StochasticModel, graphs: Iterable[Graph], request: Request) -> Prediction:
    """Predict batches and join them; a batch that is too large for the memory is divided."""
    found = [one for graph in graphs for one in _within_memory(model, graph, request)]
    whole = Prediction.join(found)
    if "std_relative_error" not in whole.details:
        return whole
    errors = [one.details["std_relative_error"] for one in found]
    worst = {name: max(error[name] for error in errors) for name in errors[0]}
    most = max(one.samples for one in found)
    return replace(whole, samples=most, details={**whole.details, "std_relative_error": worst})


def _within_memory(model: StochasticModel, graph: Graph, request: Request) -> list[Prediction]:
    try:
        return [_predict_batch(model, graph, request)]
    except TooLargeError:
        if graph.num_structures == 1:
            raise
    return [one for half in graph.halves() for one in _within_memory(model, half, request)]


def _predict_batch(model: StochasticModel, graph: Graph, request: Request) -> Prediction:
    """Predict one batch, not recalibrated."""
    chosen, details = request, {}
    if request.method == "auto":
        method, why = choose(model.posterior, graph, request)
        chosen, details = replace(request, method=method), {"chosen_because": why}
    run = BY_METHOD[chosen.method]
    bounded = is_large(graph) or chosen.memory_gb is not None
    if bounded and run is not _sampled:  # samples are bounded chunk by chunk
        kind = (*_kind(model, chosen), chosen.samples)
        model.gauge.check(kind, graph, chosen.memory_gb, lambda part: run(model, part, chosen))
    found = run(model, graph, chosen)
    changes: dict[str, Any] = {"details": {**found.details, **details}}
    if isinstance(graph, AtomGraph):
        domain = EVERY_ELEMENT if model.posterior is None else model.posterior.domain
        changes["in_domain"] = domain.contains(graph).numpy(force=True)
    return replace(found, **changes)


def choose(
    posterior: ConditionedPosterior | None, graph: Graph, request: Request
) -> tuple[str, str]:
    """Choose the method that is right furthest from the data, then the cheapest; and say why."""
    if posterior is not None and isinstance(graph, AtomGraph):
        return "conditioned", "the potential is conditioned on data"
    if request.forces or request.stress or not isinstance(graph, AtomGraph):
        return "mc", "the potential is not conditioned on data, so it is sampled"
    return "onepass", "one pass gives the deviation of energies"


def _kind(model: StochasticModel, request: Request) -> tuple[Hashable, ...]:
    """Return what the memory of a pass depends on, beside the graph and the posterior."""
    dtype = first_parameter(model.backbone).dtype
    return (request.method, request.forces, request.stress, dtype)


def _map(model: StochasticModel, graph: Graph, request: Request) -> Prediction:
    with torch.no_grad():
        return point_prediction(model(graph, **request.derivatives), graph)


def _in_one_pass(model: StochasticModel, graph: Graph, request: Request) -> Prediction:
    if model.posterior is not None:
        return predict_conditioned(model, graph, replace(request, samples=0))
    found = one_pass(model, graph, forces=request.forces, stress=request.stress)
    outputs = found.outputs | {"energy_std": found.energy_var.sqrt()}
    return point_prediction(outputs, graph, method="onepass")


def _sampled(model: StochasticModel, graph: Graph, request: Request) -> Prediction:
    """Sample k is a function of (seed, k)."""

    @torch.no_grad()  # forces switch gradients on where they need them
    def sampler(graph: Graph, numbers: range) -> Outputs:
        device = graph.positions.device
        sources = (
            [FrozenDraw(request.seed, number) for number in numbers]
            if request.method == "frozen"
            else generators(request.seed, len(numbers), numbers.start, device)
        )
        return model.sample(graph, sources, **request.derivatives).outputs

    most = MOST if request.samples == "auto" else request.samples
    kind, once = _kind(model, request), lambda part: sampler(part, range(1))
    return monte_carlo(
        sampler,
        graph,
        request.samples,
        method=request.method,
        chunk=model.gauge.chunk(kind, graph, most, request.memory_gb, once),
        tolerance=request.tolerance,
    )


BY_METHOD: dict[str, Callable[[StochasticModel, Graph, Request], Prediction]] = {
    "conditioned": predict_conditioned,
    "mc": _sampled,
    "frozen": _sampled,
    "onepass": _in_one_pass,
    "map": _map,
}
