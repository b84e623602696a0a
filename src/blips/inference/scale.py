r"""Ratio, scale and floor of a conditioned posterior, by the likelihood of validation errors.

For one ratio r the variances are tau^2 (q_i + phi), q_i = b_i^T (I + G / r)^-1 b_i. Given phi =
(floor / tau)^2, the likelihood of the errors e_i is largest at tau^2 = mean( e_i^2 / (q_i + phi) );
phi is found on a grid. The errors of one structure hang together, so their mean log-likelihood
counts once for each structure: the weight of a ratio is exp(-S NLL(r)), and the ratio that is taken
is the mean of log r under these weights. Where validation data cannot tell ratios apart, it is the
middle of what they allow. Ratios end at 1e-4 of the mean |b|^2: what was trained on is known to
better than a hundredth of what the prior leaves open. Larger ratios can look better near the data,
for models whose errors have other causes, and make error bars grow too little away from it.

Energies take the scale of the forces times a factor: errors of energies that the forces' scale
does not explain grow away from the data, as epistemic ones do, so they are no floor. Error bars of
energies are made narrower only where validation energies leave them half as wide again as needed.
"""

from typing import NamedTuple

import numpy as np

from blips.errors import InputError

RELATIVE_RATIOS = 10.0 ** np.arange(-10.0, -3.75, 0.5)  # in units of the mean |b|^2 of the rows
LARGEST_FACTOR = 4.0  # of energies: an offset of all energies is no sign of wider error bars
LEAST_VARIANCE = 1e-12  # of the mean square error, where data pin a variance down to zero
LEAST_FACTOR, SAFETY = 0.01, 1.5
LEAST_FLOOR = 0.02  # of the root mean square error: nothing is certain

Array = np.ndarray


class Fit(NamedTuple):
    """Scale and floor for one ratio, and the mean negative log-likelihood that they reach."""

    nll: float
    scale: float
    floor: float


def fit_scale_and_floor(var: Array, error: Array) -> Fit:
    """Scale and floor of largest likelihood.

    Args:
        var: q_i, variances for a scale of 1, [n].
        error: e_i, [n].
    """
    square = error**2
    if not np.any(square > 0):
        raise InputError(
            f"{len(error)} validation errors, all zero, say nothing about error bars; give "
            "labelled structures on which the model is not exact and forces do not vanish"
        )
    floors = np.concatenate([[0.0], np.median(var) * 10.0 ** np.arange(-4.0, 4.01, 0.125)])
    best = Fit(np.inf, 1.0, 1.0)
    for floor in floors:
        total = np.maximum(var + floor, LEAST_VARIANCE * square.mean())
        scale_square = np.mean(square / total)
        nll = 0.5 * (1.0 + np.log(2 * np.pi * scale_square) + np.mean(np.log(total)))
        if nll < best.nll:
            best = Fit(float(nll), float(scale_square**0.5), float((scale_square * floor) ** 0.5))
    least = LEAST_FLOOR * float(np.sqrt(square.mean()))
    return best._replace(floor=max(best.floor, least))


def choose_ratio(ratios: Array, nlls: Array, structures: int) -> float:
    """Mean of log r, weighted by exp(-S NLL(r))."""
    weights = np.exp(-structures * (nlls - nlls.min()))
    return float(np.exp(np.average(np.log(ratios), weights=weights)))


def fit_factor(var: Array, error: Array) -> float:
    """Factor on the deviations of largest likelihood, at most `LARGEST_FACTOR`.

    Where it is below one, it is 1.5 times as large, or one: a dozen energies near the data are a
    poor reason for narrow error bars far from it.

    Args:
        var: variances, [n].
        error: e_i, [n].
    """
    positive = var > 0
    if not positive.any():
        return 1.0
    best = float(np.sqrt(np.mean(error[positive] ** 2 / var[positive])))
    return min(best, LARGEST_FACTOR) if best >= 1 else min(1.0, max(SAFETY * best, LEAST_FACTOR))


def fit_floor(var: Array, error: Array, size: Array) -> float:
    """Floor f of largest likelihood for errors of variance var_i + (f size_i)^2.

    Args:
        var: known part of the variances, [n].
        error: e_i, [n].
        size: what the floor is multiplied with, such as the number of atoms, [n].
    """
    root_mean_square = float(np.sqrt(np.mean((error / size) ** 2)))
    if not root_mean_square > 0:
        raise InputError("all validation errors are zero, so they say nothing about error bars")
    floors = root_mean_square * np.concatenate([[LEAST_FLOOR], 10.0 ** np.arange(-1.5, 0.31, 0.05)])
    total = var + (floors[:, None] * size) ** 2  # [F, n]
    nll = 0.5 * (np.log(total) + error**2 / total).mean(axis=1)
    return float(floors[nll.argmin()])
