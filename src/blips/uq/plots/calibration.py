"""Whether sigmas have the right size: reliability, and errors against sigma."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation

from blips.errors import InputError
from blips.uq.checks import standardised_error
from blips.uq.metrics import binned_errors, ece_of_curve, reliability_curve
from blips.uq.plots.style import (
    COLOURS,
    DASHES,
    GUIDE,
    IDEAL_DASH,
    INK,
    add_legend,
    checked_models,
    dress,
    new_figure,
    thinned,
)

Prediction = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]
"""(mean, std, target), arrays of one shape."""


def plot_reliability(models: Mapping[str, Prediction]) -> Figure:
    """Draw observed against predicted cumulative probability for one or several models.

    Args:
        models: label -> (mean, std, target). The legend gives each model's ECE.
    """
    checked_models(models)
    figure = new_figure(4.2, 4.2)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=GUIDE, linewidth=1.0, label="ideal")
    for (label, arrays), colour, dash in zip(models.items(), COLOURS, DASHES, strict=False):
        p, p_obs = reliability_curve(*arrays)
        axes.plot(
            p,
            p_obs,
            color=colour,
            linestyle=dash,
            linewidth=1.8,
            label=f"{label} (ECE {float(ece_of_curve(p_obs)):.3f})",
        )
        if len(models) == 1:
            axes.fill_between(p, p, p_obs, color=colour, alpha=0.15, linewidth=0)
    ticks = np.linspace(0.0, 1.0, 6)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=ticks, yticks=ticks)
    dress(axes, "predicted probability $p$", r"fraction of targets below the $p$-quantile")
    add_legend(axes, "upper left")
    return figure


def plot_sigma_error(
    mean: npt.ArrayLike,
    std: npt.ArrayLike,
    target: npt.ArrayLike,
    *,
    quantity: str = "force component",
    unit: str = "eV/Å",
    n_bins: int = 10,
    max_points: int = 4000,
) -> Figure:
    """Draw errors against predicted sigma on logarithmic axes, with binned RMSE over RMS sigma.

    A calibrated model has its binned points on the diagonal. Bins hold equal counts; see
    blips.uq.metrics.binned_errors. Errors of exactly zero cannot be shown on a logarithmic axis.

    Args:
        mean: predictions, any shape.
        std: standard deviations, same shape.
        target: references, same shape.
        quantity: name for the axes.
        unit: unit for the axes.
        n_bins: number of bins.
        max_points: draw at most so many single errors, evenly spaced in the order of sigma.
    """
    rms_std, rmse = binned_errors(mean, std, target, n_bins)
    z, sigma = standardised_error(mean, std, target)
    sigma, error = sigma.ravel(), np.abs(z * sigma).ravel()
    if not np.any(error > 0.0):
        raise InputError("all errors are zero; expected errors for a logarithmic axis.")
    order = thinned(np.argsort(sigma, kind="stable"), max_points)
    order = order[error[order] > 0.0]
    figure = new_figure(4.4, 4.0)
    axes = figure.subplots()
    alpha = float(np.clip(400.0 / max(len(order), 1), 0.15, 0.7))
    axes.scatter(
        sigma[order],
        error[order],
        s=8,
        color=COLOURS[5],
        alpha=alpha,
        linewidth=0,
        label="single errors",
        rasterized=len(order) > 1000,
    )
    ends = np.array([sigma.min() / 1.3, sigma.max() * 1.3])
    ideal = r"ideal: RMSE = $\sigma$"
    axes.plot(ends, ends, color=INK, linewidth=1.0, linestyle=IDEAL_DASH, label=ideal)
    shown = rmse > 0.0
    axes.plot(
        rms_std[shown],
        rmse[shown],
        color=COLOURS[1],
        marker="o",
        markersize=5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        linewidth=1.6,
        label=f"RMSE in {n_bins} equal bins",
    )
    low = max(np.percentile(error[error > 0.0], 0.5), 1e-4 * error.max())
    top = 1.5 * max(float(error.max()), float(ends[1]))
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=(min(low, ends[0]), top))
    axes.xaxis.set_minor_formatter(LogFormatterSciNotation(minor_thresholds=(0.5, 0.2)))
    dress(axes, rf"predicted $\sigma$ of {quantity} ({unit})", f"absolute error ({unit})")
    add_legend(axes, "lower right")
    return figure
