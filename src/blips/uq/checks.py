"""Check the arrays that metrics, calibrators and figures take; each check raises InputError.

``mean`` and ``std`` describe a Gaussian prediction N(mean, std^2) of ``target``; arrays share one
shape and nothing is broadcast. Letters in shape comments: N atoms, S structures, n any number.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from blips.errors import InputError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def finite_array(name: str, values: npt.ArrayLike) -> FloatArray:
    """Return ``values`` as a non-empty, finite float64 array or raise InputError."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} cannot be read as an array of real numbers ({error}); expected a numpy array "
            "or nested lists of equal length. Convert tensors with .detach().cpu().numpy()."
        ) from error
    if array.size == 0:
        raise InputError(f"{name} is empty; expected at least one value. Check the data selection.")
    _refuse(
        name,
        ~np.isfinite(array),
        "NaN or infinite; expected finite numbers. Find the structures they come from and fix or "
        "remove them.",
    )
    return array


def positive_array(name: str, values: npt.ArrayLike) -> FloatArray:
    """Return ``values`` as a finite, strictly positive array or raise InputError."""
    array = finite_array(name, values)
    _refuse(
        name,
        array <= 0.0,
        "zero or negative; expected standard deviations above zero. Pass std=None for a "
        "deterministic model, or floor them at your numerical resolution, np.maximum(std, 1e-6).",
    )
    return array


def non_negative_array(name: str, values: npt.ArrayLike) -> FloatArray:
    """Return ``values`` as a finite array without negative entries or raise InputError.

    For what does not divide by std: a model may be exactly certain, for instance an equivariant
    one about the out-of-plane force of a planar molecule.
    """
    array = finite_array(name, values)
    _refuse(
        name,
        array < 0.0,
        "negative; expected standard deviations or absolute errors, zero or more. Check that they "
        "are neither logarithms nor signed errors.",
    )
    return array


def _refuse(name: str, bad: npt.NDArray[np.bool_], problem: str) -> None:
    if bad.any():
        count = np.count_nonzero(bad)
        raise InputError(f"{name} has {count} of {bad.size} values that are {problem}")


def same_shape(**arrays: FloatArray) -> None:
    """Raise InputError unless all arrays have one shape (nothing is broadcast)."""
    if len({array.shape for array in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise InputError(
            f"shapes differ: {shapes}; expected one common shape, because nothing is broadcast. "
            "Reshape or repeat the arrays explicitly."
        )


def checked_pair(mean: npt.ArrayLike, target: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Validate predictions and targets."""
    mean, target = finite_array("mean", mean), finite_array("target", target)
    same_shape(mean=mean, target=target)
    return mean, target


def standardised_error(
    mean: npt.ArrayLike, std: npt.ArrayLike, target: npt.ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Validate a Gaussian prediction and return (z, std) with z = (target - mean) / std."""
    mean, target = checked_pair(mean, target)
    std = positive_array("std", std)
    same_shape(mean=mean, std=std, target=target)
    return (target - mean) / std, std


def checked_ranking(score: npt.ArrayLike, error: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Validate one non-negative score (a std) and one non-negative error per item, both [n]."""
    score, error = non_negative_array("score", score), non_negative_array("error", error)
    same_shape(score=score, error=error)
    if score.ndim != 1:
        raise InputError(
            f"ranking metrics got arrays of shape {score.shape}; expected one value per item, [n]. "
            "Reduce vectors first, e.g. with force_items."
        )
    return score, error


def checked_counts(n_atoms: npt.ArrayLike, n_rows: int) -> IntArray:
    """Validate numbers of atoms per structure [S], which must add up to ``n_rows``."""
    counts = finite_array("n_atoms", n_atoms)
    whole = np.all(counts >= 1) and np.all(counts == np.round(counts))
    if counts.ndim != 1 or not whole or counts.sum() != n_rows:
        raise InputError(
            f"n_atoms must hold one positive whole number per structure, [S], and add up to the "
            f"{n_rows} rows of the forces."
        )
    return counts.astype(np.int64)
