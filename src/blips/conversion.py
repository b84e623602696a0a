"""From a plain backbone to a Bayesian potential."""

from collections.abc import Mapping
from typing import Any

import torch

from blips.backbones import refuse_settings
from blips.backbones.base import AtomisticBackbone, Backbone
from blips.bayes.convert import ConversionReport, Patterns, convert, probe_roles, revert
from blips.bayes.encoder import NETWORKS
from blips.bayes.kl import prior_coefficient
from blips.errors import BlipsError, ConversionError, InputError, refuse_unknown
from blips.potential import BayesianPotential

# Where posteriors begin: prior dropout, bounds, and initial coefficient (None: the prior's).
FROM_SCRATCH = 0.5, (1e-5, 4.0), None
# Narrow: the mean of samples is the released model within 1 % of its forces, one sample within 5 %.
PRETRAINED = 0.01, (1e-5, 0.11), 3e-4


def bayesianize(
    backbone: Backbone,
    *,
    prior_dropout: float | None = None,
    bounds: tuple[float, float] | None = None,
    initial: float | None = None,
    estimator: str = "auto",
    maps: Patterns | None = None,
    exclude: Patterns = (),
    encoder: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> BayesianPotential:
    """Turn a backbone into a Bayesian potential.

    Args:
        backbone: the plain model; it is converted in place and belongs to the result. Any other
            torch module becomes one by `blips.backbones.Adapter(module, energies_of, cutoff)`.
        prior_dropout: p of the prior N(0, p/(1-p) theta^2); 0.5, for released weights 0.01.
        bounds: least and largest coefficient (posterior variance in units of theta^2); 1e-5 and
            4, for released weights 1e-5 and 0.11.
        initial: coefficient to start from; the prior's, for released weights 3e-4.
        estimator: "local", "flipout", or "auto": flipout for conservative models, as with noise
            on outputs forces vary too little; else local on scalar rows, flipout on irreps.
        maps: name patterns of the maps to convert; None for all that have a row type, but for
            those that the backbone itself leaves deterministic.
        exclude: patterns of maps to leave deterministic.
        encoder: options of `InferenceNetwork`: hidden, depth, share.
        seed: of the inference network's initial weights.
    """
    if not isinstance(backbone, Backbone):
        raise InputError(
            f"{type(backbone).__name__} is no backbone of blips; wrap it: bayesianize("
            "blips.backbones.Adapter(module, energies_of=(module, graph) -> energies in eV, "
            "cutoff=... in A))"
        )
    roles, reasons = (backbone.roles, {}) if backbone.roles else _found_roles(backbone)
    if maps is None:
        reasons |= backbone.deterministic
    reasons |= dict.fromkeys([exclude] if isinstance(exclude, str) else exclude, "excluded")
    usual_dropout, usual_bounds, start = PRETRAINED if backbone.pretrained else FROM_SCRATCH
    dropout = usual_dropout if prior_dropout is None else prior_dropout
    least, largest = bounds or usual_bounds
    prior = prior_coefficient(dropout)
    if initial is None:
        initial = min(max(start or prior, least), largest)
    conversion = convert(backbone, roles, maps=maps or "*", exclude=reasons)
    settings = {
        "prior_dropout": dropout,
        "bounds": [least, largest],
        "initial": initial,
        "estimator": "flipout" if estimator == "auto" and backbone.conservative else estimator,
        "roles": conversion.roles,
        "reasons": {m.name: m.reason for m in conversion.maps if not m.role},
        "encoder": dict(encoder or {}),
    }
    try:
        return _assembled(backbone, conversion, settings, seed)
    except BlipsError:
        revert(backbone)
        raise


def from_settings(backbone: Backbone, settings: Mapping[str, Any]) -> BayesianPotential:
    """Convert a backbone as `potential.settings` say, for checkpoints, which have the weights."""
    conversion = convert(backbone, settings["roles"], exclude=settings["reasons"])
    return _assembled(backbone, conversion, dict(settings), seed=0)


def _assembled(
    backbone: Backbone, conversion: ConversionReport, settings: dict[str, Any], seed: int
) -> BayesianPotential:
    """Assemble the converted backbone with a new inference network."""
    low, high = settings["bounds"]
    options = dict(settings["encoder"])
    variant = options.pop("variant", "neighbourhood")
    refuse_unknown("variant", variant, NETWORKS)
    refuse_settings("the inference network", options, ("hidden", "depth", "share", "variant"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = NETWORKS[variant](
            conversion.roles,
            backbone.feature_sizes,
            bounds=(low, high),
            initial=settings["initial"],
            **options,
        )
    network.to(next(backbone.parameters()))
    return BayesianPotential(backbone, network, conversion, settings)


def _found_roles(backbone: Backbone) -> tuple[dict[str, str], dict[str, str]]:
    """Find row types by running the model on its examples, and reasons where there is none."""
    if not isinstance(backbone, AtomisticBackbone):
        raise ConversionError(
            f"{type(backbone).__name__} declares no row types; give the class roles = "
            "{pattern of names: row type}"
        )
    graph = backbone.graph(backbone.examples())
    described = backbone.row_counts(graph)
    roles, reasons = probe_roles(
        backbone, lambda: backbone(graph), {**described, "structure": graph.num_structures}
    )
    for name in [name for name, role in roles.items() if role not in described]:
        reasons[name] = f"{roles.pop(name)} rows are not described to the inference network"
    return roles, reasons
