r"""Ratio, scale and floor of a conditioned posterior, by the likelihood of validation errors.

For one ratio r the variances are tau^2 (q_i + phi + kappa F_i^2), q_i = b_i^T (I + G / r)^-1 b_i.
Given phi = (floor / tau)^2 and kappa = (relative / tau)^2, the likelihood of the errors e_i is
largest at tau^2 = mean( e_i^2 / (q_i + phi + kappa F_i^2) ); phi and kappa are found on grids. The
part in proportion to the predicted force F_i is for models whose forces are too soft or too hard
everywhere, as released ones are; it is taken only where it makes the likelihood, counted once for
each structure, larger by a factor e. It says nothing of atoms outside of the posterior's domain,
where small forces are predicted for want of knowledge: these have the root mean square of all force
components that are predicted near the data on top.

The errors of one structure hang together, so their mean log-likelihood counts once for each
structure: the weight of a ratio is exp(-S NLL(r)), and the ratio that is taken is the mean of log r
under these weights. Where validation data cannot tell ratios apart, it is the middle of what they
allow. Ratios end at 1e-4 of the mean |b|^2: what was trained on is known to better than a hundredth
of what the prior leaves open. Larger ratios can look better near the data, for models whose errors
have other causes, and make error bars grow too little away from it.

Energies take the scale of the forces times a factor: errors of energies that the forces' scale
does not explain grow away from the data, as epistemic ones do, so they are no floor. Error bars of
energies are made narrower only where validation energies leave them half as wide again as needed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from blips import keys
from blips.backbones.base import atomistic
from blips.bayes.condition import Evidence, Spectrum
from blips.bayes.noise import seeded_generator
from blips.data.labels import Labels, available, extract
from blips.data.structures import batches_of
from blips.errors import InputError
from blips.inference.linearise import LinearModel
from blips.inference.posterior import Scale
from blips.inference.rows import BATCH_ATOMS, components, force_rows
from blips.progress import track

VALID_ROWS = 24  # force components of each validation structure, at most
VANISHING = 1e-6  # rows that are smaller by this factor than the largest direction are rounding
RELATIVE_RATIOS = 10.0 ** np.arange(-10.0, -3.75, 0.5)  # in units of the mean |b|^2 of the rows
LARGEST_FACTOR = 4.0  # of energies: an offset of all energies is no sign of wider error bars
LEAST_VARIANCE = 1e-12  # of the mean square error, where data pin a variance down to zero
LEAST_FACTOR, SAFETY = 0.01, 1.5
LEAST_FLOOR = 0.02  # of the root mean square error: nothing is certain
LARGEST_RELATIVE = 0.5  # misfit over force

Array = np.ndarray


class Fit(NamedTuple):
    """Scale and misfit for one ratio, and the mean negative log-likelihood that they reach."""

    nll: float
    scale: float
    floor: float
    relative: float = 0.0


def fit_scale_and_misfit(var: Array, error: Array, force: Array, structures: int) -> Fit:
    """Fit scale, floor and relative misfit to q_i, e_i, F_i [n] of S structures."""
    best = plain = fit_scale_and_floor(var, error)
    size = np.median(var) / max(float(np.median(force**2)), np.finfo(float).tiny)
    for kappa in size * 10.0 ** np.arange(-3.0, 3.01, 0.25):
        fit = fit_scale_and_floor(var + kappa * force**2, error)
        relative = fit.scale * float(kappa**0.5)
        if fit.nll < best.nll and relative <= LARGEST_RELATIVE:
            best = fit._replace(relative=relative)
    return best if structures * (plain.nll - best.nll) > 1.0 else plain


def fit_scale_and_floor(var: Array, error: Array) -> Fit:
    """Fit scale and floor to q_i (variances for a scale of 1) and e_i [n]."""
    square = error**2
    if not np.any(square > 0):
        raise InputError(
            f"{len(error)} validation errors, all zero, say nothing about error bars; give "
            "labelled structures on which the model is not exact and forces do not vanish"
        )
    floors = np.concatenate([[0.0], np.median(var) * 10.0 ** np.arange(-4.0, 4.01, 0.125)])
    total = np.maximum(var + floors[:, None], LEAST_VARIANCE * square.mean())  # [F, n]
    scale2 = np.mean(square / total, axis=1)
    nll = 0.5 * (1.0 + np.log(2 * np.pi * scale2) + np.mean(np.log(total), axis=1))
    best = int(nll.argmin())
    least = LEAST_FLOOR * float(np.sqrt(square.mean()))
    floor = max(float((scale2[best] * floors[best]) ** 0.5), least)
    return Fit(float(nll[best]), float(scale2[best] ** 0.5), floor)


def choose_ratio(ratios: Array, nlls: Array, structures: int) -> float:
    """Average log r with weights exp(-S NLL(r))."""
    weights = np.exp(-structures * (nlls - nlls.min()))
    return float(np.exp(np.average(np.log(ratios), weights=weights)))


def fit_factor(var: Array, error: Array) -> float:
    """Fit the factor on the std by maximum likelihood, at most `LARGEST_FACTOR`.

    Where it is below one, it is 1.5 times as large, or one: a dozen energies near the data are a
    poor reason for narrow error bars far from it.
    """
    positive = var > 0
    if not positive.any():
        return 1.0
    best = float(np.sqrt(np.mean(error[positive] ** 2 / var[positive])))
    return min(best, LARGEST_FACTOR) if best >= 1 else min(1.0, max(SAFETY * best, LEAST_FACTOR))


def fit_floor(var: Array, error: Array, size: Array) -> float:
    """Fit the floor f to errors e_i of variance var_i + (f size_i)^2, by maximum likelihood."""
    root_mean_square = float(np.sqrt(np.mean((error / size) ** 2)))
    if not root_mean_square > 0:
        raise InputError("all validation errors are zero, so they say nothing about error bars")
    floors = root_mean_square * np.concatenate([[LEAST_FLOOR], 10.0 ** np.arange(-1.5, 0.31, 0.05)])
    total = var + (floors[:, None] * size) ** 2  # [F, n]
    nll = 0.5 * (np.log(total) + error**2 / total).mean(axis=1)
    return float(floors[nll.argmin()])


def fit_scale(
    model: LinearModel,
    evidence: Evidence,
    valid: Sequence[Atoms],
    *,
    seed: int,
    labels: Labels | None = None,
) -> Scale:
    """Fit ratio, scale and floors by the likelihood of validation errors.

    The labelled structures were neither trained nor tested on; the seed chooses force components.
    """
    has = set(keys_of(valid, labels))
    ratios = RELATIVE_RATIOS * evidence.mean_square
    found = _valid_errors(model, evidence.spectrum(), ratios, valid, has, seed, labels)
    if keys.FORCES in has:
        variances, error, force = found[keys.FORCES]
        fits = [fit_scale_and_misfit(var, error, force, len(valid)) for var in variances]
    else:
        variances, error, _ = found[keys.ENERGY]
        fits = [fit_scale_and_floor(var, error) for var in variances]
    ratio = choose_ratio(ratios, np.array([fit.nll for fit in fits]), len(valid))
    near = int(np.abs(np.log(ratios / ratio)).argmin())
    ratio, best = float(ratios[near]), fits[near]
    floor, factor = {keys.FORCES: best.floor}, 1.0
    if keys.ENERGY in has:
        variances, error, _ = found[keys.ENERGY]
        var = best.scale**2 * variances[near]
        factor = fit_factor(var, error)
        sizes = np.array([len(atoms) for atoms in valid], dtype=float)
        floor[keys.ENERGY] = fit_floor(factor**2 * var, error, sizes)
    if keys.FORCES not in has:  # no force label: the energy's misfit of an atom over 1 A
        floor[keys.FORCES] = floor[keys.ENERGY]
    typical = float(np.sqrt(np.mean(found[keys.FORCES][2] ** 2))) if best.relative > 0 else 0.0
    return Scale(ratio, best.scale, floor, factor, best.relative, typical)


def keys_of(valid: Sequence[Atoms], labels: Labels | None) -> list[str]:
    """Return the quantities that all validation structures have labels of; error if none."""
    if not valid:
        raise InputError("the list of validation structures is empty; error bars need some labels")
    has = set[str].intersection(*(set(available(atoms, labels)) for atoms in valid))
    has &= {keys.ENERGY, keys.FORCES}
    if not has:
        raise InputError(
            "the validation structures have neither energies nor forces in common; the scale of "
            "error bars needs labels (geometries are enough for the conditioning structures)"
        )
    return sorted(has)


def _valid_errors(
    model: LinearModel,
    spectrum: Spectrum,
    ratios: Array,
    valid: Sequence[Atoms],
    has: set[str],
    seed: int,
    labels: Labels | None,
) -> dict[str, tuple[Array, Array, Array]]:
    """Compute variances, errors and means of energies and of force components.

    Variances are those for a scale of 1 and all ratios, [ratios, n]; the others [n].
    """
    grid = torch.as_tensor(ratios)
    least = VANISHING * float(spectrum.values.max()) ** 0.5
    found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {name: [] for name in has}
    generator = seeded_generator("valid rows", seed)
    backbone, forces = atomistic(model.backbone), keys.FORCES in has
    for batch in batches_of(track(valid, "fitting the scale", len(valid)), BATCH_ATOMS):
        graph = backbone.graph(batch)
        linearised = model(graph, forces=forces, depth="rows" if forces else "members")
        known = [extract(atoms, sorted(has), labels) for atoms in batch]
        if keys.ENERGY in has:
            target = torch.tensor([float(one[keys.ENERGY]) for one in known], dtype=torch.float64)
            var = spectrum.variances(linearised.energy_rows(), grid)
            mean = linearised.outputs[keys.ENERGY].double()
            found[keys.ENERGY].append((var, mean - target, mean))
        if not forces:
            continue
        target = torch.as_tensor(np.concatenate([one[keys.FORCES] for one in known]))
        predicted = linearised.outputs[keys.FORCES].double()  # [N, 3]
        for u, present, row in force_rows(linearised, components(graph, VALID_ROWS, generator)):
            moves = row.norm(dim=1) > least  # forces that vanish by symmetry say nothing
            error, mean = (
                graph.sum_over_structures((u * values).sum(dim=1))[present][moves]
                for values in (predicted - target, predicted)
            )
            found[keys.FORCES].append((spectrum.variances(row[moves], grid), error, mean))
    return {
        name: (torch.cat(v, dim=-1).numpy(), torch.cat(e).numpy(), torch.cat(m).numpy())
        for name, (v, e, m) in ((name, zip(*parts, strict=True)) for name, parts in found.items())
    }
