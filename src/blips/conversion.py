"""From a plain backbone to a Bayesian potential."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from ase import Atoms
from torch import nn

from blips.backbones.base import AtomisticBackbone, Backbone
from blips.backbones.generic import EnergiesOf, GenericBackbone, GraphOf, RowsOf
from blips.bayes.convert import Selection, convert, probe_roles
from blips.bayes.encoder import InferenceNetwork
from blips.bayes.kl import prior_coefficient
from blips.bayes.noise import ESTIMATORS
from blips.data.graph import Graph
from blips.errors import ConversionError, InputError
from blips.potential import BayesianPotential


class Posterior(NamedTuple):
    """Where `bayesianize` lets posteriors begin; `initial` None is the prior's width."""

    prior_dropout: float
    bounds: tuple[float, float]
    initial: float | None


FROM_SCRATCH = Posterior(0.5, (1e-5, 4.0), None)
# Narrow: the mean of samples is the released model within 1 % of its forces, one sample within 5 %.
PRETRAINED = Posterior(0.01, (1e-5, 0.11), 3e-4)


def bayesianize(
    backbone: Backbone | nn.Module,
    *,
    energies_of: EnergiesOf | None = None,
    cutoff: float | None = None,
    graph_of: GraphOf | None = None,
    rows: RowsOf | None = None,
    example: Sequence[Atoms] | None = None,
    prior_dropout: float | None = None,
    bounds: tuple[float, float] | None = None,
    initial: float | None = None,
    estimator: str = "auto",
    maps: Selection = None,
    exclude: Selection = (),
    roles: Mapping[str, str] | None = None,
    probe: Graph | None = None,
    reasons: Mapping[str, str] | None = None,
    encoder: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> BayesianPotential:
    """Turn a backbone into a Bayesian potential.

    Args:
        backbone: the plain model; it is converted in place and belongs to the result. Any other
            torch module needs `energies_of` and `cutoff`, and may need the next three; they are
            explained at `blips.backbones.generic.GenericBackbone`.
        energies_of: (module, graph) -> energies in eV, of atoms or of structures.
        cutoff: radius of the neighbour list, A.
        graph_of: (atoms, dtype) -> graph, where it is not all pairs within the cutoff.
        rows: graph -> features of further row types.
        example: structures that the module knows, in place of water and methane.
        prior_dropout: p of the prior N(0, p/(1-p) theta^2); 0.5, for released weights 0.01.
        bounds: least and largest coefficient (posterior variance in units of theta^2); 1e-5 and
            4, for released weights 1e-5 and 0.11.
        initial: coefficient to start from; by default the prior's, for released weights 3e-4,
            within the bounds.
        estimator: "local", "flipout", or "auto": flipout for conservative models, otherwise
            local on scalar rows and flipout on irreps. Both sample the same energies, but only
            flipout samples weights, and so the right spread of derivatives: with noise on the
            outputs, forces vary too little.
        maps: name patterns, or a predicate (name, module), of the maps to convert; None for all
            that have a row type, but for those that the backbone itself leaves deterministic.
        exclude: patterns or predicate of maps to leave deterministic.
        roles: name pattern -> row type, in place of the backbone's own declaration.
        probe: find the row types by running the model on this graph instead; it needs different
            numbers of edges, nodes and structures. A backbone that declares no roles is probed
            on water and methane.
        reasons: why maps without a row type have none, by name, for the report.
        encoder: options of `InferenceNetwork`: hidden, depth, embedding, variant, share, clamp.
        seed: of the inference network's initial weights.
    """
    if estimator not in ESTIMATORS:
        raise InputError(f"unknown estimator {estimator!r}; use one of {', '.join(ESTIMATORS)}")
    adapter = (energies_of, cutoff, graph_of, rows, example)
    if not isinstance(backbone, Backbone):
        backbone = _wrap(backbone, *adapter)
    elif any(option is not None for option in adapter):
        raise InputError(
            f"{type(backbone).__name__} is a backbone and has its own graph, energies and rows; "
            "energies_of, cutoff, graph_of, rows and example are for other modules"
        )
    if roles is None:
        declared = _deterministic(backbone)
        roles, reasons = backbone.roles, {**declared, **(reasons or {})}
        maps = (lambda name, _module: name not in declared) if maps is None else maps
    if probe is not None or not roles:
        roles, found = _probe(backbone, probe)
        reasons = {**found, **(reasons or {})}
    conversion = convert(backbone, roles, maps=maps, exclude=exclude, reasons=reasons)
    begin = _beginning(backbone, prior_dropout, bounds, initial)
    settings = {
        "prior_dropout": begin.prior_dropout,
        "bounds": list(begin.bounds),
        "initial": begin.initial,
        "estimator": "flipout" if estimator == "auto" and backbone.conservative else estimator,
        "roles": conversion.roles,
        "reasons": {m.name: m.reason for m in conversion.maps if not m.is_bayesian},
        "encoder": dict(encoder or {}),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = InferenceNetwork(
            conversion.roles,
            backbone.feature_sizes,
            bounds=begin.bounds,
            initial=settings["initial"],
            **settings["encoder"],
        )
    network.to(next(backbone.parameters()))
    return BayesianPotential(backbone, network, conversion, settings)


def _beginning(
    backbone: Backbone,
    prior_dropout: float | None,
    bounds: tuple[float, float] | None,
    initial: float | None,
) -> Posterior:
    """The arguments, and defaults where they are None."""
    default = PRETRAINED if backbone.pretrained else FROM_SCRATCH
    dropout = default.prior_dropout if prior_dropout is None else prior_dropout
    least, largest = bounds = default.bounds if bounds is None else bounds
    prior = prior_coefficient(dropout)
    if initial is None:
        initial = min(max(default.initial or prior, least), largest)
    return Posterior(dropout, bounds, initial)


def _wrap(
    module: nn.Module,
    energies_of: EnergiesOf | None,
    cutoff: float | None,
    graph_of: GraphOf | None,
    rows: RowsOf | None,
    example: Sequence[Atoms] | None,
) -> GenericBackbone:
    if energies_of is None or cutoff is None:
        raise InputError(
            f"{type(module).__name__} is no backbone of blips; to wrap it, give "
            "energies_of=(module, graph) -> energies in eV, and cutoff in A"
        )
    return GenericBackbone(
        module, energies_of, cutoff, graph_of=graph_of, rows=rows, example=example
    )


def _deterministic(backbone: Backbone) -> dict[str, str]:
    """Why the backbone leaves maps deterministic, by their names."""
    reasons: dict[str, str] = {}
    for name, _ in backbone.named_modules():
        for pattern, reason in backbone.deterministic.items():
            if fnmatchcase(name, pattern):
                reasons.setdefault(name, reason)
    return reasons


def _probe(backbone: Backbone, probe: Graph | None) -> tuple[dict[str, str], dict[str, str]]:
    """Row types found by running the model, and reasons where there is none."""
    if probe is None:
        if not isinstance(backbone, AtomisticBackbone):
            raise ConversionError(
                f"{type(backbone).__name__} declares no row types; give roles={{pattern: type}} "
                "or a probe graph with different numbers of edges, nodes and structures"
            )
        probe = backbone.graph(backbone.examples())
    parameter = next(backbone.parameters())
    graph = probe.to(parameter.device, parameter.dtype)
    described = backbone.row_counts(graph)
    roles, reasons = probe_roles(
        backbone, lambda: backbone(graph), {**described, "structure": graph.num_structures}
    )
    for name in [name for name, role in roles.items() if role not in described]:
        reasons[name] = f"{roles.pop(name)} rows are not described to the inference network"
    return roles, reasons
