r"""Predictions of the conditioned posterior: the plain model's means, error bars by members.

Members are linear in their noise, E_k = E + b_E . v_k, F_k = -dE_k/dr. The mean of the posterior
is v = 0, so deviations are taken from the plain model's outputs, with K in the denominator:

    std = sqrt( 1/K sum_k (y_k - y)^2 )

The energy's is exact, b_E^T Lambda^-1 b_E, wherever the posterior has more than draws. Deviations
of energies have the posterior's `energy_factor` on top, which validation energies decide.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from ase.data import chemical_symbols
from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone
from blips.data.graph import AtomGraph, Graph
from blips.errors import InputError
from blips.inference.linearise import Linearised
from blips.inference.posterior import ConditionedPosterior, unknown_structures
from blips.predict import Outputs, Prediction, point_prediction

ATOM_DRAWS = 64  # of the energies of atoms, where no forces are asked for: they cost little


def predict_conditioned(
    backbone: Backbone,
    posterior: ConditionedPosterior,
    graph: Graph,
    *,
    samples: int,
    seed: int = 0,
    forces: bool = True,
    stress: bool = False,
    covariance: bool = False,
    coefficients: Mapping[str, Tensor] | None = None,
) -> Prediction:
    """Means and standard deviations of one batch.

    Args:
        backbone: the model, at its trained weights.
        posterior: of some of its maps.
        graph: the structures.
        samples: K, draws for forces and stress.
        seed: of the draws.
        forces: also predict forces.
        stress: also predict the stress.
        covariance: also the 3x3 covariance of each atom's force.
        coefficients: of the inference network, where the posterior was made with them.
    """
    if samples < 2:
        raise InputError(
            f"samples={samples}: a deviation needs at least 2 draws; "
            'use method="map" for a prediction without error bars'
        )
    linearised = linearise(backbone, posterior, graph, forces, stress, coefficients)
    graph = linearised.graph
    unknown = unknown_structures(posterior, graph.numbers, graph.structure, graph.num_structures)
    changes = linearised.members(_draws(posterior, samples, seed, forces or stress))
    if bool(unknown.any()):
        _warn(posterior, graph)
        wide = linearised.members(posterior.prior_draws(samples, seed))
        changes = {name: _where(unknown, graph, wide[name], v) for name, v in changes.items()}
    arrays: dict[str, Any] = {
        f"{name}_std": change.double().square().mean(dim=0).sqrt().cpu().numpy()
        for name, change in changes.items()
    }
    arrays |= _exact_energy_std(linearised, posterior, unknown)
    for name in (keys.ENERGY, keys.ENERGIES):
        if f"{name}_std" in arrays:
            arrays[f"{name}_std"] = posterior.scale.energy_factor * arrays[f"{name}_std"]
    if covariance and forces:
        cov = torch.einsum("kna,knb->nab", *[changes[keys.FORCES].double()] * 2) / samples
        arrays["forces_cov"] = cov.cpu().numpy()
    mean = point_prediction(linearised.outputs, graph, method="conditioned")
    for name, floor in posterior.scale.floor.items():
        if f"{name}_std" in arrays:
            size = mean.n_atoms if name == keys.ENERGY else np.ones_like(arrays[f"{name}_std"])
            arrays[f"{name}_aleatoric_std"] = floor * size
    return replace(mean, samples=samples, **arrays)


def member_outputs(
    backbone: Backbone,
    posterior: ConditionedPosterior,
    graph: Graph,
    v: Tensor,
    *,
    forces: bool = True,
    stress: bool = False,
    coefficients: Mapping[str, Tensor] | None = None,
) -> Outputs:
    """Outputs of the members with noise v [K, d]: energy [K * S], ..., replica-major."""
    linearised = linearise(backbone, posterior, graph, forces, stress, coefficients)
    changes = linearised.members(v)
    return {
        name: (linearised.outputs[name] + change).flatten(0, 1) for name, change in changes.items()
    }


def linearise(
    backbone: Backbone,
    posterior: ConditionedPosterior,
    graph: Graph,
    forces: bool,
    stress: bool,
    coefficients: Mapping[str, Tensor] | None,
) -> Linearised:
    """The model on a batch, to first order in the noise of the posterior's weights."""
    if not isinstance(graph, AtomGraph):
        raise InputError(f"a conditioned posterior needs an AtomGraph, got {type(graph).__name__}")
    return Linearised(
        backbone, graph, posterior.maps, coefficients=coefficients, forces=forces, stress=stress
    )


def _draws(posterior: ConditionedPosterior, samples: int, seed: int, derivatives: bool) -> Tensor:
    """`samples` draws; more where they cost no backward pass, as far as there are more."""
    if derivatives or posterior.gaussian is None:
        return posterior.draws(samples, seed)
    return posterior.draws(max(samples, ATOM_DRAWS), seed)


def _exact_energy_std(
    linearised: Linearised, posterior: ConditionedPosterior, unknown: Tensor
) -> dict[str, Any]:
    if posterior.gaussian is None:
        return {}
    rows = linearised.energy_rows().double()
    var = posterior.gaussian.var(rows)
    prior = posterior.scale.scale**2 * rows.square().sum(dim=1)
    return {"energy_std": torch.where(unknown, prior, var).sqrt().cpu().numpy()}


def _where(unknown: Tensor, graph: AtomGraph, wide: Tensor, narrow: Tensor) -> Tensor:
    """Changes [K, S or N, ...]: the wide ones for unknown structures."""
    of_atoms = narrow.shape[1] == graph.num_nodes and narrow.shape[1] != graph.num_structures
    mask = unknown[graph.structure] if of_atoms else unknown
    return torch.where(mask.view(1, -1, *[1] * (narrow.ndim - 2)), wide, narrow)


def _warn(posterior: ConditionedPosterior, graph: AtomGraph) -> None:
    lacking = sorted(set(graph.numbers.tolist()) - posterior.numbers)
    symbols = ", ".join(chemical_symbols[number] for number in lacking)
    warnings.warn(
        f"the structures that the posterior was conditioned on have no {symbols}; structures "
        "with it get error bars as wide as the prior's. Condition on such structures too",
        stacklevel=2,
    )
