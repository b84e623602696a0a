r"""Predictions of the conditioned posterior: the plain model's means, error bars by members.

Members are linear in their noise, E_k = E + b_E . v_k, F_k = -dE_k/dr. The mean of the posterior
is v = 0, so deviations are taken from the plain model's outputs, with K in the denominator:

    std = sqrt( 1/K sum_k (y_k - y)^2 )

The energy's is exact, b_E^T Lambda^-1 b_E, wherever the posterior has more than draws; with
`samples=0` (method "onepass"), where that product would take half the time, 64 draws stand for it.
Deviations of energies have the posterior's `energy_factor` on top, set by validation energies.
"""

import warnings

import torch
from ase.data import chemical_symbols
from torch import Tensor

from blips import keys
from blips.backbones.base import first_parameter
from blips.data.graph import AtomGraph, Graph
from blips.defaults import SAMPLES
from blips.inference.linearise import Depth, Linearised
from blips.inference.monte_carlo import refuse_few
from blips.inference.posterior import ConditionedPosterior
from blips.inference.sampling import Request, StochasticModel
from blips.prediction import Outputs, Prediction, point_prediction

ATOM_DRAWS = 64  # of the energies of atoms, where no forces are asked for: they cost little


def predict_conditioned(model: StochasticModel, graph: Graph, request: Request) -> Prediction:
    """Predict means and standard deviations of one batch, by the conditioned posterior.

    K = `request.samples` draws give deviations of forces and stress; 0 those of energies alone.
    """
    samples = SAMPLES if request.samples == "auto" else request.samples
    if samples:
        refuse_few(samples)
    posterior, seed = model.conditioned(), request.seed
    depth: Depth = "members" if samples else "energies"
    linearised = model.linear_model()(
        graph, forces=request.forces, stress=request.stress, depth=depth
    )
    changes_of = linearised.members if samples else linearised.energy_changes
    count = samples
    if not samples or not (request.forces or request.stress):  # these cost no backward pass
        count = max(samples, ATOM_DRAWS)
        if posterior.kept_draws is not None:
            count = min(count, len(posterior.kept_draws))
    dtype = first_parameter(model.backbone).dtype
    changes = changes_of(posterior.weight_noise(count, seed, dtype))
    unknown = _unknown_structures(posterior, linearised.graph)
    if unknown is not None:
        wide = changes_of(posterior.prior_draws(count, seed))
        for name, narrow in changes.items():  # [K, S or N, ...]
            of_atoms = name in (keys.ENERGIES, keys.FORCES)
            mask = unknown[linearised.graph.structure] if of_atoms else unknown
            mask = mask.view(-1, *[1] * (narrow.ndim - 2))
            changes[name] = torch.where(mask, wide[name], narrow)
    found = {f"{k}_std": v.double().square().mean(dim=0).sqrt() for k, v in changes.items()}
    if samples and posterior.spectrum is not None:
        rows = linearised.energy_rows().double()
        var = posterior.spectrum.var(rows, posterior.scale.ratio, posterior.scale.scale)
        if unknown is not None:  # the prior's
            var = torch.where(unknown, posterior.scale.scale**2 * rows.square().sum(dim=1), var)
        found["energy_std"] = var.sqrt()
    for name in found.keys() & {"energy_std", "energies_std"}:
        found[name] = posterior.scale.energy_factor * found[name]
    found |= _misfits(posterior, linearised, found)
    method = "conditioned" if samples else "onepass"
    return point_prediction(linearised.outputs | found, graph, method=method, samples=samples)


def _misfits(posterior: ConditionedPosterior, linearised: Linearised, found: Outputs) -> Outputs:
    """Return the aleatoric std of the quantities that have an epistemic one."""
    scale = posterior.scale
    misfits = {
        name: torch.full_like(found[f"{name}_std"], floor)
        for name, floor in scale.floor.items()
        if f"{name}_std" in found
    }
    if keys.ENERGY in misfits:
        misfits[keys.ENERGY] *= linearised.graph.node_counts()
    if keys.FORCES in misfits:
        relative = scale.relative * linearised.outputs[keys.FORCES].double()
        misfits[keys.FORCES] = torch.hypot(misfits[keys.FORCES], relative)
        if scale.typical > 0:
            outside = ~posterior.domain.contains(linearised.graph)[:, None]
            misfits[keys.FORCES] = torch.hypot(misfits[keys.FORCES], scale.typical * outside)
    return {f"{name}_aleatoric_std": misfit for name, misfit in misfits.items()}


def _unknown_structures(posterior: ConditionedPosterior, graph: AtomGraph) -> Tensor | None:
    """Return structures with an element that the conditioning data lack, [S] bool, if any."""
    lacking = ~posterior.domain.known.to(graph.numbers.device)[graph.numbers]
    if not bool(lacking.any()):
        return None
    symbols = [chemical_symbols[number] for number in graph.numbers[lacking].unique().tolist()]
    warnings.warn(
        f"the structures that the posterior was conditioned on have no {', '.join(symbols)}; "
        "structures with it get error bars as wide as the prior's. Condition on such structures "
        "too",
        stacklevel=2,
    )
    return graph.sum_over_structures(lacking.int()) > 0
