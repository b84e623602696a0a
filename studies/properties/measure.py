"""How right error bars of a property are: before and after one factor, and softening.

Half of the materials, at most 50, fit the factor, the others judge it; figures are means over
random halves, with the range of 90 % of them. Everything else is of all materials, with 95 %
intervals of a bootstrap over materials.

Spearman's rho of error bars that are exactly right is below 1, as an error is a random number: the
less their stds differ, the lower. `spearman_ideal` is its mean over errors drawn with these stds.
"""

from collections.abc import Callable

import numpy as np
from scipy.stats import norm

from blips.inference.alignment import fit_alignment
from blips.uq.calibrate import ScaleCalibrator
from blips.uq.metrics import coverage, ece, spearman

Array = np.ndarray
Metric = dict[str, float | None]
SPLITS, RESAMPLES, MOST = 500, 1000, 50
CORRECTED_SPLITS = 100


def judged(value: Array, std: Array, known: Array, seed: int = 0) -> dict[str, Metric]:
    """Compute metrics of values [n] and stds [n] against known values [n]."""
    rng = np.random.default_rng(seed)
    error = np.abs(value - known)

    def interval(metric: Callable[[Array], float]) -> Metric:
        everything = np.arange(len(value))
        resampled = [metric(rng.integers(len(value), size=len(value))) for _ in range(RESAMPLES)]
        low, high = np.quantile(resampled, [0.025, 0.975])
        return {"value": metric(everything), "low": float(low), "high": float(high)}

    found = {
        "n": {"value": float(len(value)), "low": None, "high": None},
        "mae": interval(lambda i: float(error[i].mean())),
        "spearman": interval(lambda i: spearman(std[i], error[i])),
        "spearman_value": interval(lambda i: spearman(np.abs(value[i]), error[i])),
        "coverage68": interval(lambda i: _covered(value[i], std[i], known[i], 0.68)),
        "coverage90": interval(lambda i: _covered(value[i], std[i], known[i], 0.9)),
        "ece": interval(lambda i: ece(value[i], std[i], known[i])),
        "spearman_ideal": _over(
            [spearman(std, std * np.abs(rng.normal(size=len(std)))) for _ in range(SPLITS)]
        ),
    }
    return found | _calibrated(value, std, known, rng)


def _calibrated(
    value: Array, std: Array, known: Array, rng: np.random.Generator
) -> dict[str, Metric]:
    """Compute metrics of the materials that did not fit the factor, over random halves."""
    rows: list[dict[str, float]] = []
    for _ in range(SPLITS):
        order = rng.permutation(len(value))
        fit, test = np.split(order, [min(MOST, len(value) // 2)])
        row: dict[str, float] = {}
        z = np.abs(value[fit] - known[fit]) / std[fit]
        factors = {
            "nll": ScaleCalibrator.fit(value[fit], std[fit], known[fit]).factor,
            "quantile": float(np.quantile(z, 0.9) / norm.ppf(0.95)),
        }
        for name, factor in factors.items():
            wide = factor * std[test]
            row[f"{name}_factor"] = factor
            for level in (0.68, 0.9):
                found = _covered(value[test], wide, known[test], level)
                row[f"{name}_coverage{round(100 * level)}"] = found
            row[f"{name}_ece"] = ece(value[test], wide, known[test])
        rows.append(row)
    return {name: _over([row[name] for row in rows]) for name in rows[0]}


def aligned(shares: Array, value: Array, std: Array, known: Array) -> dict[str, Metric]:
    """Compute metrics after energies of elements were fitted to a few materials; of the others.

    Args:
        shares: of each element in the materials, [n, 119]; the fit is that of
            `blips.inference.alignment`, whose uncertainty and misfit are added to the std.
        value: of the model, eV/atom, [n].
        std: its error bars.
        known: what DFT says.
    """

    def correct(fit: Array, test: Array) -> tuple[Array, Array]:
        found = fit_alignment(shares[fit], (known - value)[fit], np.square(std[fit]))
        unsure = np.einsum("sz,zy,sy->s", shares[test], found.cov, shares[test])
        wide = np.sqrt(np.square(std[test]) + unsure + found.misfit**2)
        return value[test] + shares[test] @ found.shift, wide

    return _corrected(correct, known)


def scaled(value: Array, std: Array, known: Array) -> dict[str, Metric]:
    """Compute metrics after one scale, see `softening`, was fitted to a few; of the others."""

    def correct(fit: Array, test: Array) -> tuple[Array, Array]:
        scale, scale_std = softening(value[fit], known[fit])
        return scale * value[test], np.hypot(scale * std[test], scale_std * value[test])

    return _corrected(correct, known)


def _corrected(
    correct: Callable[[Array, Array], tuple[Array, Array]], known: Array
) -> dict[str, Metric]:
    """Compute metrics of the materials that did not fit a correction, over random choices.

    `correct` is given the numbers of those that fit and of the others; it returns the others'
    values and stds.
    """
    rng = np.random.default_rng(0)
    rows: list[dict[str, float]] = []
    for _ in range(CORRECTED_SPLITS):
        fit, test = np.split(rng.permutation(len(known)), [min(MOST, len(known) // 2)])
        (value, std), truth = correct(fit, test), known[test]
        error = np.abs(value - truth)
        row = {f"coverage{p}": _covered(value, std, truth, p / 100) for p in (68, 90)}
        row |= {"n": float(len(test)), "mae": float(error.mean()), "ece": ece(value, std, truth)}
        rows.append(row | {"spearman": spearman(std, error)})
    return {name: _over([row[name] for row in rows]) for name in rows[0]}


def _covered(value: Array, std: Array, known: Array, level: float) -> float:
    return coverage(value, std, known, level)


def _over(values: list[float]) -> Metric:
    low, high = np.quantile(values, [0.05, 0.95])
    return {"value": float(np.mean(values)), "low": float(low), "high": float(high)}


def softening(value: Array, known: Array, seed: int = 0) -> tuple[float, float]:
    """Fit s of known = s * value, and its std: median of the ratios, bootstrap over materials."""
    ratio = known / value
    rng = np.random.default_rng(seed)
    resampled = np.median(rng.choice(ratio, (RESAMPLES, len(ratio))), axis=1)
    return float(np.median(ratio)), float(np.std(resampled))
