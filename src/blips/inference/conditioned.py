r"""Predictions of the conditioned posterior: the plain model's means, error bars by members.

Members are linear in their noise, E_k = E + b_E . v_k, F_k = -dE_k/dr. The mean of the posterior
is v = 0, so deviations are taken from the plain model's outputs, with K in the denominator:

    std = sqrt( 1/K sum_k (y_k - y)^2 )

The energy's is exact, b_E^T Lambda^-1 b_E, wherever the posterior has more than draws. Deviations
of energies have the posterior's `energy_factor` on top, which validation energies decide.
"""

import warnings
from collections.abc import Callable
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
from blips.inference.linearise import CoefficientFunction, Depth, Linearised, Noise
from blips.inference.posterior import ConditionedPosterior, unknown_structures
from blips.prediction import Outputs, Prediction, point_prediction

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
    coefficients: CoefficientFunction | None = None,
) -> Prediction:
    """Means and standard deviations of one batch.

    Args:
        backbone: the model, at its trained weights.
        posterior: of some of its maps.
        graph: the structures.
        samples: K, draws for forces and stress; 0 gives deviations of energies alone.
        seed: of the draws.
        forces: also predict forces.
        stress: also predict the stress.
        covariance: also the 3x3 covariance of each atom's force.
        coefficients: the inference network, where the posterior was made with it.
    """
    if samples < 2 and samples != 0:
        raise InputError(
            f"samples={samples}: a deviation needs at least 2 draws; "
            'use method="map" for a prediction without error bars'
        )
    depth: Depth = "members" if samples else "energies"
    linearised = linearise(backbone, posterior, graph, forces, stress, coefficients, depth)
    if samples == 0:
        return _energies_alone(linearised, posterior, seed)
    graph = linearised.graph
    count = _number_of_draws(posterior, samples, forces or stress)
    changes, unknown = _widened(linearised.members, linearised, posterior, count, seed)
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
    if "forces_aleatoric_std" in arrays:
        relative = posterior.scale.relative * mean.array(keys.FORCES)
        arrays["forces_aleatoric_std"] = np.hypot(arrays["forces_aleatoric_std"], relative)
    return replace(mean, samples=samples, **arrays)


def _energies_alone(
    linearised: Linearised, posterior: ConditionedPosterior, seed: int
) -> Prediction:
    """Deviations of energies by many draws: they need no backward pass of their own."""
    graph = linearised.graph
    count = _number_of_draws(posterior, ATOM_DRAWS, derivatives=False)
    changes, _ = _widened(linearised.energy_changes, linearised, posterior, count, seed)
    factor = posterior.scale.energy_factor
    arrays: dict[str, Any] = {
        f"{name}_std": factor * change.square().mean(dim=0).sqrt().cpu().numpy()
        for name, change in changes.items()
    }
    mean = point_prediction(linearised.outputs, graph, method="onepass")
    arrays["energy_aleatoric_std"] = posterior.scale.floor.get(keys.ENERGY, 0.0) * mean.n_atoms
    return replace(mean, **arrays)


def _widened(
    changes_of: Callable[[Noise], Outputs],
    linearised: Linearised,
    posterior: ConditionedPosterior,
    count: int,
    seed: int,
) -> tuple[Outputs, Tensor]:
    """Changes for `count` draws, of the prior where elements are unknown; where they are."""
    graph = linearised.graph
    unknown = unknown_structures(posterior, graph.numbers, graph.structure, graph.num_structures)
    changes = changes_of(posterior.weight_noise(count, seed, graph.positions.dtype))
    if not bool(unknown.any()):
        return changes, unknown
    _warn(posterior, graph)
    wide = changes_of(posterior.prior_draws(count, seed))
    return {k: _where(unknown, graph, wide[k], v) for k, v in changes.items()}, unknown


def member_outputs(
    backbone: Backbone,
    posterior: ConditionedPosterior,
    graph: Graph,
    v: Tensor,
    *,
    forces: bool = True,
    stress: bool = False,
    coefficients: CoefficientFunction | None = None,
) -> Outputs:
    """Outputs of the member with noise v [d]: energy [S], forces [N, 3], ..."""
    return linearise(backbone, posterior, graph, forces, stress, coefficients).member(v)


def linearise(
    backbone: Backbone,
    posterior: ConditionedPosterior,
    graph: Graph,
    forces: bool,
    stress: bool,
    coefficients: CoefficientFunction | None,
    depth: Depth = "members",
) -> Linearised:
    """The model on a batch, to first order in the noise of the posterior's weights."""
    if not isinstance(graph, AtomGraph):
        raise InputError(f"a conditioned posterior needs an AtomGraph, got {type(graph).__name__}")
    return Linearised(
        backbone,
        graph,
        posterior.maps,
        coefficients=coefficients,
        forces=forces,
        stress=stress,
        depth=depth,
    )


def _number_of_draws(posterior: ConditionedPosterior, samples: int, derivatives: bool) -> int:
    """`samples`; more where they cost no backward pass, as far as there are more."""
    if derivatives:
        return samples
    kept = posterior.kept_draws
    return max(samples, ATOM_DRAWS) if kept is None else min(max(samples, ATOM_DRAWS), len(kept))


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
